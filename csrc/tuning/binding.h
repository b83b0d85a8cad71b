// Budget choice for Python, as part of the module `_core`.
#pragma once

#include <pybind11/pybind11.h>

namespace sb {

void BindTuning(pybind11::module_& m);

}  // namespace sb

// The kernels of each instruction set that this build contains.
#pragma once

#include "attention/problem.h"

namespace sb {

namespace baseline {
extern const KernelTable kTable;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
#endif

}  // namespace sb

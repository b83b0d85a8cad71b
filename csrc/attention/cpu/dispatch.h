// Which instruction set runs.
#pragma once

#include "attention/problem.h"

namespace sb {

// The best kernels that this CPU can run, or those that the environment variable SB_CPU_ISA names
// (in any case). Throws std::runtime_error when it names an unknown instruction set or one that
// this CPU or build lacks.
const KernelTable& Kernels();

// The kernels of one instruction set, or nullptr where this CPU or build lacks it.
const KernelTable* KernelsOf(const char* isa);

}  // namespace sb

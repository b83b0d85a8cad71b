// Runs test_pieces.cpp if this CPU has its instruction set; built without that set's flags, so that
// it can ask.
#include "attention/cpu/dispatch.h"
#include "tests/expect.h"

extern "C" int sb_test_pieces();

int main() {
  if (sb::KernelsOf(SB_TESTED_ISA) == nullptr) {
    std::printf("this CPU lacks %s\n", SB_TESTED_ISA);
    return sb::kSkipped;
  }
  return sb_test_pieces() == 0 ? 0 : 1;
}

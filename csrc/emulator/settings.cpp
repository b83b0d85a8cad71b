// Settings from a line of text.
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>

#include "emulator/state.h"

namespace emulator {
namespace {

[[noreturn]] void Refuse(const std::string& word) {
  throw std::invalid_argument(
      "emulator setting '" + word +
      "' is unknown: a typing error would silently test less. To fix it, write words such as "
      "order=forward|reverse|random, seed=N, copies=late|early, poison=0|1, mma=exact|truncate, "
      "blocks=ordered|unordered, shared_kb=N, multiprocessors=N, stack_kb=N.");
}

}  // namespace

void Configure(const char* text) {
  Settings s;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t sign = word.find('=');
    if (sign == std::string::npos) Refuse(word);
    const std::string name = word.substr(0, sign), value = word.substr(sign + 1);
    const auto either = [&](const char* no, const char* yes) {
      if (value != no && value != yes) Refuse(word);
      return value == yes;
    };
    const auto number = [&] {
      char* end = nullptr;
      const unsigned long long x = std::strtoull(value.c_str(), &end, 10);
      if (value.empty() || *end != '\0') Refuse(word);
      return static_cast<uint64_t>(x);
    };
    if (name == "order" && value == "random")
      s.order = Settings::Order::kRandom;
    else if (name == "order")
      s.order =
          either("forward", "reverse") ? Settings::Order::kReverse : Settings::Order::kForward;
    else if (name == "seed")
      s.seed = number();
    else if (name == "copies")
      s.late_copies = either("early", "late");
    else if (name == "poison")
      s.poison = either("0", "1");
    else if (name == "mma")
      s.truncating_mma = either("exact", "truncate");
    else if (name == "blocks")
      s.between_blocks = either("ordered", "unordered");
    else if (name == "shared_kb")
      s.shared_limit = static_cast<unsigned>(number() * 1024);
    else if (name == "multiprocessors")
      s.multiprocessors = static_cast<unsigned>(number());
    else if (name == "stack_kb")
      s.stack_bytes = number() * 1024;
    else
      Refuse(word);
  }
  settings = s;
}

const Settings& CurrentSettings() { return settings; }
Counters& CurrentCounters() { return counters; }

}  // namespace emulator

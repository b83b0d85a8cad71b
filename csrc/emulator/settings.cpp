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
      "' is unknown or out of range: a typing error would silently test less. To fix it, write "
      "words such as "
      "order=forward|reverse|random, seed=N, copies=late|early, poison=0|1, mma=exact|truncate, "
      "blocks=ordered|unordered, shared_kb=N, multiprocessors=N (1 or more), stack_kb=N (16 or "
      "more).");
}

bool is_configured = false;

}  // namespace

void Configure(const char* text) {
  Settings s;
  const char* environment = std::getenv("SB_EMULATOR");
  // What is given here comes last, and so counts.
  std::istringstream words(std::string(environment == nullptr ? "" : environment) + " " + text);
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
      const bool is_number = value[0] >= '0' && value[0] <= '9' && *end == '\0';
      // A smaller stack would end in a crash, a grid of no multiprocessor in none.
      const uint64_t least = name == "stack_kb" ? 16 : name == "multiprocessors" ? 1 : 0;
      if (!is_number || x < least) Refuse(word);
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
  is_configured = true;
}

const Settings& CurrentSettings() {
  if (!is_configured) Configure("");
  return settings;
}
Counters& CurrentCounters() { return counters; }

}  // namespace emulator

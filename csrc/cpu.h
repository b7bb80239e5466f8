// Which instruction sets this machine has.

#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace octavo {

// Those of the usable ones that are emulated: in builds for tests alone. They are for no engine to choose.
std::vector<std::string> emulated_sets();

// Names of the usable instruction sets, the fastest first; "generic" is always the last of those that this
// machine has, and emulated ones come after it.
std::vector<std::string> instruction_sets();

// Their kernels, or null.
const Kernels* find_kernels(const std::string& name);

}  // namespace octavo

// Which instruction sets this machine has.

#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace octavo {

// Names of the usable instruction sets, the fastest first; "generic" is always the last.
std::vector<std::string> instruction_sets();

// Their kernels, or null.
const Kernels* find_kernels(const std::string& name);

}  // namespace octavo

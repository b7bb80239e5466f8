// The operators, written once over the primitives of vector.h. Included by one file per instruction
// set, which then fills its table.

#pragma once

#include "attention.h"
#include "channels.h"
#include "rows.h"
#include "weigh.h"

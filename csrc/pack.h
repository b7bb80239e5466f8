// How weights lie in memory: panels of 16 outputs, so that one vector holds one weight of each.
//
// bf16         per panel: inputs / 2 rows of 16 pairs (two consecutive inputs of one output)
// int8         per panel: 16 scales as floats; then per group of 32 inputs 8 rows of 16 x 4 signed bytes, of
//              which the four are inputs 0, 2, 1, 3; an even number of groups
// int4         per panel: 16 scales as floats; then per group of 32 inputs 4 rows of 16 x 2 x 4 codes of 4 bits,
//              of which code j of half h is input 2 j + h; 16 multipliers of 16 bits; 16 pairs of signed bytes, zi
//              and zf: weight = scale * ((code * multiplier + 64) / 128 - CENTER + zi + zf / 256)
// int8_group   per panel and group of 32 inputs: 8 rows of 16 x 4 unsigned bytes (value + 128),
//              then 16 scales as halves
// int4_group   per panel and group of 32 inputs: 4 rows of 16 x 4 bytes, of which row i holds the
//              inputs 8i..8i+3 in the low and 8i+4..8i+7 in the high nibbles; then 16 scales and
//              16 minima as halves: weight = scale * nibble + minimum
//
// Inputs are padded with zeros to whole groups, outputs to whole panels.

#pragma once

#include "step.h"
#include "stored.h"

namespace octavo {

constexpr int PANEL = 16;
constexpr int GROUP = 32;
constexpr int CHANNEL_SCALES = 64;
constexpr int CHANNEL_INT8_BLOCK = 8 * 64;
constexpr int CHANNEL_INT4_BLOCK = 4 * 64 + 64;
// The middle of what a code of the int4 format becomes, 0 to 240.
constexpr int INT4_CENTER = 120;
constexpr int INT8_BLOCK = 8 * 64 + 32;
constexpr int INT4_BLOCK = 4 * 64 + 64;

inline int groups_of(int inputs) { return (inputs + GROUP - 1) / GROUP; }
inline int panels_of(int outputs) { return (outputs + PANEL - 1) / PANEL; }

// One scale per output, and activations of 16 bits.
inline bool is_channel(Format format) { return format == Format::int8 || format == Format::int4; }

inline int64_t panel_bytes(Format format, int inputs) {
    switch (format) {
        case Format::bf16: return int64_t((inputs + 1) / 2) * 64;
        case Format::int8: return CHANNEL_SCALES + int64_t(groups_of(inputs) + 1) / 2 * 2 * CHANNEL_INT8_BLOCK;
        case Format::int4: return CHANNEL_SCALES + int64_t(groups_of(inputs)) * CHANNEL_INT4_BLOCK;
        case Format::int8_group: return int64_t(groups_of(inputs)) * INT8_BLOCK;
        case Format::int4_group: return int64_t(groups_of(inputs)) * INT4_BLOCK;
    }
    return 0;
}

// Pack rows [first, first + num_rows) of a matrix given as floats; `first` is a multiple of 16.
void pack_bf16(const float* rows, int first, int num_rows, int inputs, uint8_t* panels);
// Symmetric: the largest weight of an output, or of a group, becomes +-127.
void pack_int8(const float* rows, int first, int num_rows, int inputs, uint8_t* panels);
void pack_int8_group(const float* rows, int first, int num_rows, int inputs, uint8_t* panels);
// From weights that were scale * nibble + minimum with halves, (rows, groups) of each: rounded to the output's
// steps; exact.
void pack_int4(const uint8_t* nibbles, const uint16_t* scales, const uint16_t* minima, int first, int num_rows,
               int inputs, uint8_t* panels);
void pack_int4_group(const uint8_t* nibbles, const uint16_t* scales, const uint16_t* minima, int first,
               int num_rows, int inputs, uint8_t* panels);
// From rows as a file stores them. The layouts of 4 bits take types that have codes.
void pack_stored(const StoredType& type, Format format, const uint8_t* rows, int first, int num_rows, int inputs,
                 uint8_t* panels);
// One row of a packed matrix as floats.
void unpack_row(const Matrix& matrix, int row, float* out);

}  // namespace octavo

// Rows of matrices as weight files store them: how they become floats, or codes of 4 bits.
//
// Bit for bit what octavo/weights/quants.py makes of them, whose tests are these; the layouts are ggml's blocks.

#pragma once

#include <cstdint>
#include <string>

namespace octavo {

// Groups of 32 weights that are scale * nibble + minimum, with halves.
struct CodeRow {
    uint8_t* nibbles;
    uint16_t *scales, *minima;
};

// A type of stored numbers: `elements` of them in a block of `bytes`. Rows are whole blocks, at any address.
struct StoredType {
    const char* name;
    int elements, bytes;
    void (*floats)(const uint8_t* row, int inputs, float* out);
    // Null for a type that is not made of such groups.
    void (*codes)(const uint8_t* row, int inputs, CodeRow out);

    int64_t row_bytes(int inputs) const { return int64_t(inputs) / elements * bytes; }
};

// The type by its name in octavo/weights/source.py; null if there is none.
const StoredType* find_stored(const std::string& name);

}  // namespace octavo

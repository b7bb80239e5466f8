#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"

namespace octavo {

namespace {

uint8_t* block_of(uint8_t* panels, Format format, int inputs, int row, int group) {
    const int size = format == Format::int8_group ? INT8_BLOCK : INT4_BLOCK;
    return panels + (row / PANEL) * panel_bytes(format, inputs) + int64_t(group) * size;
}

void set_half(uint8_t* at, int lane, uint16_t half) { std::memcpy(at + 2 * lane, &half, 2); }

uint16_t get_half(const uint8_t* at, int lane) {
    uint16_t half;
    std::memcpy(&half, at + 2 * lane, 2);
    return half;
}

}  // namespace

void pack_bf16(const float* rows, int first, int num_rows, int inputs, uint8_t* panels) {
    for (int r = 0; r < num_rows; ++r) {
        const int row = first + r, lane = row % PANEL;
        auto* panel = reinterpret_cast<uint16_t*>(panels + (row / PANEL) * panel_bytes(Format::bf16, inputs));
        for (int i = 0; i < inputs; ++i)
            panel[(i / 2) * 32 + lane * 2 + i % 2] = bf16_of(rows[int64_t(r) * inputs + i]);
    }
}

void pack_int8(const float* rows, int first, int num_rows, int inputs, uint8_t* panels) {
    for (int r = 0; r < num_rows; ++r) {
        const int row = first + r, lane = row % PANEL;
        const float* x = rows + int64_t(r) * inputs;
        for (int g = 0; g < groups_of(inputs); ++g) {
            const int begin = g * GROUP, end = std::min(inputs, begin + GROUP);
            float top = 0;
            for (int i = begin; i < end; ++i) top = std::max(top, std::fabs(x[i]));
            // Quantise with the scale as it will be read, not as it would have been.
            const uint16_t half = half_of(top / 127);
            const float scale = float_of_half(half);
            uint8_t* block = block_of(panels, Format::int8_group, inputs, row, g);
            for (int i = begin; i < begin + GROUP; ++i) {
                const float exact = i < end && scale > 0 ? x[i] / scale : 0;
                const int value = int(std::lrintf(std::clamp(exact, -127.f, 127.f)));
                const int k = i - begin;
                block[(k / 4) * 64 + lane * 4 + k % 4] = uint8_t(value + 128);
            }
            set_half(block + 512, lane, half);
        }
    }
}

void pack_int4(const uint8_t* nibbles, const uint16_t* scales, const uint16_t* minima, int first,
               int num_rows, int inputs, uint8_t* panels) {
    const int groups = groups_of(inputs);
    for (int r = 0; r < num_rows; ++r) {
        const int row = first + r, lane = row % PANEL;
        for (int g = 0; g < groups; ++g) {
            uint8_t* block = block_of(panels, Format::int4_group, inputs, row, g);
            const uint8_t* values = nibbles + (int64_t(r) * groups + g) * GROUP;
            for (int k = 0; k < GROUP; ++k) {
                uint8_t& byte = block[(k / 8) * 64 + lane * 4 + k % 4];
                byte = k % 8 < 4 ? uint8_t((byte & 0xf0) | values[k]) : uint8_t((byte & 0x0f) | values[k] << 4);
            }
            set_half(block + 256, lane, scales[int64_t(r) * groups + g]);
            set_half(block + 288, lane, minima[int64_t(r) * groups + g]);
        }
    }
}

void unpack_row(const Matrix& matrix, int row, float* out) {
    const int lane = row % PANEL, inputs = matrix.inputs;
    const uint8_t* panel = matrix.panels + (row / PANEL) * panel_bytes(matrix.format, inputs);
    for (int i = 0; i < inputs; ++i) {
        const int k = i % GROUP;
        if (matrix.format == Format::bf16) {
            out[i] = float_of_bf16(get_half(panel + int64_t(i / 2) * 64 + 2 * (i % 2), 2 * lane));
        } else if (matrix.format == Format::int8_group) {
            const uint8_t* block = panel + int64_t(i / GROUP) * INT8_BLOCK;
            const float scale = float_of_half(get_half(block + 512, lane));
            out[i] = scale * float(block[(k / 4) * 64 + lane * 4 + k % 4] - 128);
        } else {
            const uint8_t* block = panel + int64_t(i / GROUP) * INT4_BLOCK;
            const uint8_t byte = block[(k / 8) * 64 + lane * 4 + k % 4];
            const float scale = float_of_half(get_half(block + 256, lane));
            const float minimum = float_of_half(get_half(block + 288, lane));
            out[i] = scale * float(k % 8 < 4 ? byte & 15 : byte >> 4) + minimum;
        }
    }
}

}  // namespace octavo

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

uint8_t* panel_of(uint8_t* panels, Format format, int inputs, int row) {
    return panels + (row / PANEL) * panel_bytes(format, inputs);
}

void set_scale(uint8_t* panel, int lane, float scale) { std::memcpy(panel + 4 * lane, &scale, 4); }

float get_scale(const uint8_t* panel, int lane) {
    float scale;
    std::memcpy(&scale, panel + 4 * lane, 4);
    return scale;
}

// Where input i of a lane lies in a panel of the int8 format.
int64_t int8_place(int i, int lane) {
    constexpr int ORDER[] = {0, 2, 1, 3};
    return CHANNEL_SCALES + int64_t(i / 4) * 64 + lane * 4 + ORDER[i % 4];
}

// A group of codes: weight = scale * code + minimum, turned round if need be so that the scale is not negative.
struct Codes {
    float scale, minimum;
    bool is_flipped;

    Codes(float s, float m) : scale(std::fabs(s)), minimum(s < 0 ? m + 15 * s : m), is_flipped(s < 0) {}

    // The smallest step of the output that this group can be told in.
    float smallest_step() const {
        return std::max({scale * 128 / 2047, -minimum / (127 + INT4_CENTER), minimum / (127 - INT4_CENTER)});
    }
};

}  // namespace

void pack_bf16(const float* rows, int first, int num_rows, int inputs, uint8_t* panels) {
    for (int r = 0; r < num_rows; ++r) {
        const int row = first + r, lane = row % PANEL;
        auto* panel = reinterpret_cast<uint16_t*>(panels + (row / PANEL) * panel_bytes(Format::bf16, inputs));
        for (int i = 0; i < inputs; ++i)
            panel[(i / 2) * 32 + lane * 2 + i % 2] = bf16_of(rows[int64_t(r) * inputs + i]);
    }
}

void pack_int8_group(const float* rows, int first, int num_rows, int inputs, uint8_t* panels) {
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

void pack_int4_group(const uint8_t* nibbles, const uint16_t* scales, const uint16_t* minima, int first,
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

void pack_int8(const float* rows, int first, int num_rows, int inputs, uint8_t* panels) {
    for (int r = 0; r < num_rows; ++r) {
        const float* x = rows + int64_t(r) * inputs;
        uint8_t* panel = panel_of(panels, Format::int8, inputs, first + r);
        float top = 0;
        for (int i = 0; i < inputs; ++i) top = std::max(top, std::fabs(x[i]));
        const int lane = (first + r) % PANEL;
        const float scale = top / 127, inverse = top > 0 ? 127 / top : 0;
        set_scale(panel, lane, scale);
        for (int i = 0; i < inputs; ++i)
            panel[int8_place(i, lane)] = uint8_t(int8_t(std::lrintf(std::clamp(x[i] * inverse, -127.f, 127.f))));
    }
}

void pack_int4(const uint8_t* nibbles, const uint16_t* scales, const uint16_t* minima, int first, int num_rows,
               int inputs, uint8_t* panels) {
    const int groups = groups_of(inputs);
    for (int r = 0; r < num_rows; ++r) {
        const int lane = (first + r) % PANEL;
        uint8_t* panel = panel_of(panels, Format::int4, inputs, first + r);
        auto codes_of = [&](int g) {
            const int64_t at = int64_t(r) * groups + g;
            return Codes(float_of_half(scales[at]), float_of_half(minima[at]));
        };
        float step = 0;
        for (int g = 0; g < groups; ++g) step = std::max(step, codes_of(g).smallest_step());
        set_scale(panel, lane, step);
        const float inverse = step > 0 ? 1 / step : 0;
        for (int g = 0; g < groups; ++g) {
            const Codes codes = codes_of(g);
            const uint8_t* values = nibbles + (int64_t(r) * groups + g) * GROUP;
            uint8_t* block = panel + CHANNEL_SCALES + int64_t(g) * CHANNEL_INT4_BLOCK;
            for (int k = 0; k < GROUP; ++k) {
                const int code = codes.is_flipped ? 15 - values[k] : values[k], shift = k % 8 / 2 * 4;
                uint16_t half = get_half(block + k / 8 * 64, 2 * lane + k % 2);
                half = uint16_t((half & ~(15 << shift)) | code << shift);
                set_half(block + k / 8 * 64, 2 * lane + k % 2, half);
            }
            set_half(block + 256, lane, uint16_t(std::lrintf(std::min(codes.scale * inverse * 128, 2047.f))));
            const float offset = codes.minimum * inverse + INT4_CENTER;
            const int whole = int(std::lrintf(std::clamp(offset, -128.f, 127.f)));
            const int part = int(std::lrintf(std::clamp((offset - float(whole)) * 256, -128.f, 127.f)));
            block[288 + 2 * lane] = uint8_t(int8_t(whole)), block[289 + 2 * lane] = uint8_t(int8_t(part));
        }
    }
}

void unpack_row(const Matrix& matrix, int row, float* out) {
    const int lane = row % PANEL, inputs = matrix.inputs;
    const uint8_t* panel = matrix.panels + (row / PANEL) * panel_bytes(matrix.format, inputs);
    for (int i = 0; i < inputs; ++i) {
        const int k = i % GROUP;
        if (matrix.format == Format::int8) {
            out[i] = get_scale(panel, lane) * float(int8_t(panel[int8_place(i, lane)]));
        } else if (matrix.format == Format::int4) {
            const uint8_t* block = panel + CHANNEL_SCALES + int64_t(i / GROUP) * CHANNEL_INT4_BLOCK;
            const int code = get_half(block + k / 8 * 64, 2 * lane + k % 2) >> k % 8 / 2 * 4 & 15;
            const int whole = ((code * get_half(block + 256, lane) + 64) >> 7) - INT4_CENTER;
            const float offset = float(int8_t(block[288 + 2 * lane])) + float(int8_t(block[289 + 2 * lane])) / 256;
            out[i] = get_scale(panel, lane) * (float(whole) + offset);
        } else if (matrix.format == Format::bf16) {
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

#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

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

// Four numbers at a time, as the least of machines has them.
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
constexpr int FOUR = 4;

Floats four(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// The largest magnitude in a group; a NaN counts for nothing.
float largest(const float* group) {
    Floats tops = {};
    for (int k = 0; k < GROUP; k += FOUR) {
        const Floats size = Floats(Ints(four(group + k)) & 0x7fffffff);
        tops = tops < size ? size : tops;
    }
    float top = 0;
    for (int i = 0; i < FOUR; ++i) top = std::max(top, tops[i]);
    return top;
}

// The nearest integers from -127 to 127, ties to even: adding 1.5 * 2^23 rounds so.
Ints rounded(Floats x) {
    x = x < -127.f ? Floats{} - 127.f : x;
    x = x > 127.f ? Floats{} + 127.f : x;
    return Ints(x + 0x1.8p23f) - int32_t(bits_of(0x1.8p23f));
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
    const int pairs = (inputs + 1) / 2;
    std::vector<uint16_t> values(2 * pairs);  // a last input without a neighbour gets a zero
    for (int r = 0; r < num_rows; ++r) {
        const int row = first + r, lane = row % PANEL;
        const float* x = rows + int64_t(r) * inputs;
        for (int i = 0; i < inputs; ++i) values[i] = bf16_of(x[i]);
        uint8_t* panel = panel_of(panels, Format::bf16, inputs, row) + 4 * lane;
        for (int i = 0; i < pairs; ++i) std::memcpy(panel + int64_t(i) * 64, &values[2 * i], 4);
    }
}

void pack_int8_group(const float* rows, int first, int num_rows, int inputs, uint8_t* panels) {
    for (int r = 0; r < num_rows; ++r) {
        const int row = first + r, lane = row % PANEL;
        const float* x = rows + int64_t(r) * inputs;
        for (int g = 0; g < groups_of(inputs); ++g) {
            float filled[GROUP] = {};
            const float* group = x + g * GROUP;
            if (const int left = inputs - g * GROUP; left < GROUP)
                group = static_cast<float*>(std::memcpy(filled, group, sizeof(float) * left));
            // Quantise with the scale as it will be read, not as it would have been.
            const uint16_t half = half_of(largest(group) / 127);
            const float scale = float_of_half(half), divisor = scale > 0 ? scale : INFINITY;
            int32_t steps[GROUP];
            for (int k = 0; k < GROUP; k += FOUR) {
                const Ints found = rounded(four(group + k) / divisor);
                std::memcpy(steps + k, &found, sizeof found);
            }
            uint8_t values[GROUP];
            for (int k = 0; k < GROUP; ++k) values[k] = uint8_t(steps[k] + 128);
            uint8_t* block = block_of(panels, Format::int8_group, inputs, row, g);
            for (int k = 0; k < GROUP; k += 4) std::memcpy(block + k * 16 + lane * 4, values + k, 4);
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
            for (int k = 0; k < GROUP; k += 8) {
                uint32_t low, high;
                std::memcpy(&low, values + k, 4), std::memcpy(&high, values + k + 4, 4);
                low |= high << 4;
                std::memcpy(block + k * 8 + lane * 4, &low, 4);
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

void pack_stored(const StoredType& type, Format format, const uint8_t* rows, int first, int num_rows, int inputs,
                 uint8_t* panels) {
    const bool has_codes = format == Format::int4 || format == Format::int4_group;
    const int64_t groups = groups_of(inputs), size = int64_t(PANEL) * inputs;
    std::vector<float> floats(has_codes ? 0 : size);
    std::vector<uint8_t> nibbles(has_codes ? PANEL * groups * GROUP : 0);
    std::vector<uint16_t> scales(has_codes ? PANEL * groups : 0), minima(scales.size());
    const auto pack_floats = format == Format::bf16 ? pack_bf16 : format == Format::int8 ? pack_int8 : pack_int8_group;
    const auto pack_codes = format == Format::int4 ? pack_int4 : pack_int4_group;
    for (int done = 0; done < num_rows; done += PANEL) {  // what a panel takes stays in the cache
        const int count = std::min(PANEL, num_rows - done);
        for (int r = 0; r < count; ++r, rows += type.row_bytes(inputs)) {
            if (has_codes)
                type.codes(rows, inputs, {&nibbles[r * groups * GROUP], &scales[r * groups], &minima[r * groups]});
            else
                type.floats(rows, inputs, &floats[int64_t(r) * inputs]);
        }
        if (has_codes)
            pack_codes(nibbles.data(), scales.data(), minima.data(), first + done, count, inputs, panels);
        else
            pack_floats(floats.data(), first + done, count, inputs, panels);
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

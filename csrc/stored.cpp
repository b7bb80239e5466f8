#include "stored.h"

#include <cmath>
#include <cstring>

#include "half.h"

namespace octavo {

namespace {

constexpr int GROUP = 32;

template <class T>
T read(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// As `float_of_half`, for infinities and NaN too: any bytes may be in a file.
float exact_float(uint16_t half) {
    if ((half & 0x7c00) != 0x7c00) return float_of_half(half);
    return float_of_bits(uint32_t(half & 0x8000) << 16 | 0x7f800000 | uint32_t(half & 0x3ff) << 13);
}

float half_at(const uint8_t* at) { return exact_float(read<uint16_t>(at)); }

// As `half_of`, but what is too large becomes infinite.
uint16_t exact_half(float x) {
    const uint16_t sign = uint16_t(bits_of(x) >> 16 & 0x8000);
    if (std::isnan(x)) return sign | 0x7e00;
    return std::fabs(x) >= 65520.f ? sign | 0x7c00 : half_of(x);
}

struct F32 {
    static constexpr const char* NAME = "F32";
    static constexpr int ELEMENTS = 1, BYTES = 4;
    static void floats(const uint8_t* __restrict block, float* __restrict out) { *out = read<float>(block); }
};

struct F16 {
    static constexpr const char* NAME = "F16";
    static constexpr int ELEMENTS = 1, BYTES = 2;
    static void floats(const uint8_t* __restrict block, float* __restrict out) { *out = half_at(block); }
};

struct BF16 {
    static constexpr const char* NAME = "BF16";
    static constexpr int ELEMENTS = 1, BYTES = 2;
    static void floats(const uint8_t* __restrict block, float* __restrict out) { *out = float_of_bf16(read<uint16_t>(block)); }
};

// 32 nibbles in 16 bytes: the low ones come first.
void spread(const uint8_t* __restrict packed, uint8_t* __restrict out) {
    for (int i = 0; i < 16; ++i) out[i] = packed[i] & 15;
    for (int i = 0; i < 16; ++i) out[16 + i] = packed[i] >> 4;
}

// A scale and 32 nibbles; weight = scale * (nibble - 8).
struct Q4_0 {
    static constexpr const char* NAME = "Q4_0";
    static constexpr int ELEMENTS = 32, BYTES = 18;
    static void floats(const uint8_t* __restrict block, float* __restrict out) {
        uint8_t nibbles[GROUP];
        spread(block + 2, nibbles);
        const float scale = half_at(block);
        for (int i = 0; i < GROUP; ++i) out[i] = scale * float(nibbles[i] - 8);
    }
    static void codes(const uint8_t* block, CodeRow out) {
        spread(block + 2, out.nibbles);
        out.scales[0] = read<uint16_t>(block);
        out.minima[0] = exact_half(half_at(block) * -8);
    }
};

// A scale, a minimum and 32 nibbles; weight = scale * nibble + minimum.
struct Q4_1 {
    static constexpr const char* NAME = "Q4_1";
    static constexpr int ELEMENTS = 32, BYTES = 20;
    static void floats(const uint8_t* __restrict block, float* __restrict out) {
        uint8_t nibbles[GROUP];
        spread(block + 4, nibbles);
        const float scale = half_at(block), minimum = half_at(block + 2);
        for (int i = 0; i < GROUP; ++i) out[i] = scale * float(nibbles[i]) + minimum;
    }
    static void codes(const uint8_t* block, CodeRow out) {
        spread(block + 4, out.nibbles);
        out.scales[0] = read<uint16_t>(block);
        out.minima[0] = read<uint16_t>(block + 2);
    }
};

// 32 values of 5 bits: the fifth bits in a word, then the low four as nibbles.
void spread_five(const uint8_t* __restrict high, const uint8_t* __restrict low, uint8_t* __restrict out) {
    spread(low, out);
    const uint32_t fifth = read<uint32_t>(high);
    for (int i = 0; i < GROUP; ++i) out[i] |= uint8_t((fifth >> i & 1) << 4);
}

struct Q5_0 {
    static constexpr const char* NAME = "Q5_0";
    static constexpr int ELEMENTS = 32, BYTES = 22;
    static void floats(const uint8_t* __restrict block, float* __restrict out) {
        uint8_t values[GROUP];
        spread_five(block + 2, block + 6, values);
        const float scale = half_at(block);
        for (int i = 0; i < GROUP; ++i) out[i] = scale * float(values[i] - 16);
    }
};

struct Q5_1 {
    static constexpr const char* NAME = "Q5_1";
    static constexpr int ELEMENTS = 32, BYTES = 24;
    static void floats(const uint8_t* __restrict block, float* __restrict out) {
        uint8_t values[GROUP];
        spread_five(block + 4, block + 8, values);
        const float scale = half_at(block), minimum = half_at(block + 2);
        for (int i = 0; i < GROUP; ++i) out[i] = scale * float(values[i]) + minimum;
    }
};

struct Q8_0 {
    static constexpr const char* NAME = "Q8_0";
    static constexpr int ELEMENTS = 32, BYTES = 34;
    static void floats(const uint8_t* __restrict block, float* __restrict out) {
        const float scale = half_at(block);
        for (int i = 0; i < GROUP; ++i) out[i] = float(int8_t(block[2 + i])) * scale;
    }
};

// The scale (of 6 bits) of group g of a block of 256, and its minimum, out of 12 bytes.
int scale_of(const uint8_t* packed, int g) {
    return g < 4 ? packed[g] & 63 : (packed[4 + g] & 15) | (packed[g - 4] >> 6) << 4;
}
int minimum_of(const uint8_t* packed, int g) {
    return g < 4 ? packed[4 + g] & 63 : packed[4 + g] >> 4 | (packed[g] >> 6) << 4;
}

// Two halves, eight scales and minima, 128 bytes of nibbles, of which 32 hold one group in their low and the next
// in their high halves; weight = scale * d * nibble - minimum * dmin.
struct Q4_K {
    static constexpr const char* NAME = "Q4_K";
    static constexpr int ELEMENTS = 256, BYTES = 144;
    static void floats(const uint8_t* __restrict block, float* __restrict out) {
        const float d = half_at(block), dmin = half_at(block + 2);
        for (int g = 0; g < 8; ++g) {
            const float scale = d * float(scale_of(block + 4, g)), minimum = dmin * float(minimum_of(block + 4, g));
            const uint8_t* values = block + 16 + g / 2 * 32;
            for (int i = 0; i < GROUP; ++i)
                out[g * GROUP + i] = scale * float(values[i] >> g % 2 * 4 & 15) - minimum;
        }
    }
    // The products are rounded to halves.
    static void codes(const uint8_t* block, CodeRow out) {
        const float d = half_at(block), dmin = half_at(block + 2);
        for (int g = 0; g < 8; ++g) {
            const uint8_t* values = block + 16 + g / 2 * 32;
            for (int i = 0; i < GROUP; ++i) out.nibbles[g * GROUP + i] = values[i] >> g % 2 * 4 & 15;
            out.scales[g] = exact_half(d * float(scale_of(block + 4, g)));
            out.minima[g] = exact_half(-dmin * float(minimum_of(block + 4, g)));
        }
    }
};

// As Q4_K, and before the nibbles 32 bytes: bit g of byte i is the fifth of value i of group g.
struct Q5_K {
    static constexpr const char* NAME = "Q5_K";
    static constexpr int ELEMENTS = 256, BYTES = 176;
    static void floats(const uint8_t* __restrict block, float* __restrict out) {
        const float d = half_at(block), dmin = half_at(block + 2);
        for (int g = 0; g < 8; ++g) {
            const float scale = d * float(scale_of(block + 4, g)), minimum = dmin * float(minimum_of(block + 4, g));
            const uint8_t *high = block + 16, *low = block + 48 + g / 2 * 32;
            for (int i = 0; i < GROUP; ++i) {
                const int value = (low[i] >> g % 2 * 4 & 15) | (high[i] >> g & 1) << 4;
                out[g * GROUP + i] = scale * float(value) - minimum;
            }
        }
    }
};

// 128 bytes of low nibbles, 64 of two high bits, 16 signed scales, a half; weight = d * scale * (value - 32). Each
// half of the block is four rows of 32: two in the low nibbles of 64 bytes, two in the high ones.
struct Q6_K {
    static constexpr const char* NAME = "Q6_K";
    static constexpr int ELEMENTS = 256, BYTES = 210;
    static void floats(const uint8_t* __restrict block, float* __restrict out) {
        const float d = half_at(block + 208);
        for (int r = 0; r < 8; ++r) {
            const uint8_t* low = block + r / 4 * 64 + r % 2 * 32;
            const uint8_t* high = block + 128 + r / 4 * 32;
            for (int i = 0; i < GROUP; ++i) {
                const int value = (low[i] >> r % 4 / 2 * 4 & 15) | (high[i] >> r % 4 * 2 & 3) << 4;
                const float scale = d * float(int8_t(block[192 + 2 * r + i / 16]));
                out[r * GROUP + i] = scale * float(value - 32);
            }
        }
    }
};

template <class Type>
void floats_of_row(const uint8_t* row, int inputs, float* out) {
    for (int i = 0; i < inputs; i += Type::ELEMENTS, row += Type::BYTES) Type::floats(row, out + i);
}

template <class Type>
void codes_of_row(const uint8_t* row, int inputs, CodeRow out) {
    for (int i = 0; i < inputs; i += Type::ELEMENTS, row += Type::BYTES) {
        const int group = i / GROUP;
        Type::codes(row, {out.nibbles + i, out.scales + group, out.minima + group});
    }
}

template <class Type>
constexpr StoredType stored_type() {
    StoredType type{Type::NAME, Type::ELEMENTS, Type::BYTES, floats_of_row<Type>, nullptr};
    if constexpr (requires { &Type::codes; }) type.codes = codes_of_row<Type>;
    return type;
}

constexpr StoredType TYPES[] = {
    stored_type<F32>(),  stored_type<F16>(),  stored_type<BF16>(), stored_type<Q4_0>(),
    stored_type<Q4_1>(), stored_type<Q5_0>(), stored_type<Q5_1>(), stored_type<Q8_0>(),
    stored_type<Q4_K>(), stored_type<Q5_K>(), stored_type<Q6_K>(),
};

}  // namespace

const StoredType* find_stored(const std::string& name) {
    for (const StoredType& type : TYPES)
        if (name == type.name) return &type;
    return nullptr;
}

}  // namespace octavo

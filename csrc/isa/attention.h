// Attention over pages: softmax(scale q k^T + mask) v for rows of one KV head.
//
// A page's keys are tiles of 16 positions, [position / 16][dim / g][16 positions][g dims], its values
// [dim / 16][position / g][16 dims][g positions]: g is 2 for floats and 4 for int8.
// Positions are cut into segments of 256 at absolute multiples. Each starts from fresh softmax state
// and is merged left to right; a row that sees nothing of one keeps its state bit for bit. Row i of a
// tile is head i % group of row i / group. Limit: a decoded row, memory (measured on Zen 5, 64 rows: 25 GB/s one
// thread, 43 two, of 46 and 47 to 54); a prompt, the vector ports (AVX-512: 160 of 269 Gflop/s a thread).

#pragma once

#include "../kernels.h"
#include "vector.h"

namespace {

using octavo::AttentionJob;
using octavo::Pages;
using octavo::Parts;
using octavo::SEGMENT;
using octavo::Upcoming;

constexpr int MAX_DIMS = 512;
// Scores are multiplied by it, so that weights are powers of two.
constexpr float LOG2_E = 1.44269504f;
// The score of what a row does not see: below all others, but finite.
constexpr float HIDDEN = -1e38f;

// Positions [start, start + length) of one segment, and where their keys and values lie.
//
// While keys are scored, their values are fetched, line by line, and while those are mixed, the keys that are read
// next: in one go they would wait for each other, and the work for them.
struct Segment {
    const AttentionJob& job;
    const Pages& pages;
    int start, length;
    bool is_cold;  // its first reader fetches
    Upcoming next;

    // How far from the keys of positions [offset, offset + 16) to a line of their values that is to be fetched.
    int64_t to_values() const { return is_cold ? pages.page_elements() * pages.element_bytes : 0; }

    // How far from the values of the block at `offset` to keys that are read next.
    template <class Element>
    int64_t to_next_keys(int offset) const {
        const int position = next.begin + offset;
        if (!next.block_table || position >= next.end) return 0;
        const uint8_t* keys = pages.page(job.layer, next.block_table[position / pages.block_size], next.kv_head);
        return keys - (const uint8_t*)(page<Element>(offset) + pages.page_elements());
    }

    // Called for positions [offset, offset + 16): fetch all that at once.
    template <class Element>
    void fetch(int offset) const {
        if (!is_cold) return;
        const int bytes = LANES * pages.head_dim * int(sizeof(Element)), block = pages.block_size;
        const int part = (start + offset) % block / LANES * LANES * pages.head_dim;
        prefetch_far(page<Element>(offset) + pages.page_elements() + part, bytes);
        if (sizeof(Element) == 1 && part == 0) prefetch_far(page<Element>(offset) + 2 * pages.page_elements(), 8 * block);
        if (offset + block < length) prefetch_far(page<Element>(offset + block) + part, bytes);
    }

    // Of int8 keys from position start + offset on, to the end of its block; those of values follow a block later.
    const float* scales(int offset) const {
        return (const float*)(page<int8_t>(offset) + 2 * pages.page_elements()) + (start + offset) % pages.block_size;
    }

    template <class Element>
    const Element* keys(int offset) const {
        return page<Element>(offset) + int64_t((start + offset) % pages.block_size) * pages.head_dim;
    }

    // Of dims [dim, dim + 16), from the block of position start + offset on.
    template <class Element>
    const Element* values(int offset, int dim) const {
        return page<Element>(offset) + pages.page_elements() + int64_t(dim) * pages.block_size +
               (start + offset) % pages.block_size * 16;
    }

  private:
    template <class Element>
    const Element* page(int offset) const {
        return (const Element*)page_at(start + offset);
    }

    const uint8_t* page_at(int position) const {
        return pages.page(job.layer, job.block_table[position / pages.block_size], job.kv_head);
    }
};

// --- scores and sums in float, R rows at a time -----------------------------------------------------

// R queries with 16 positions' keys: a running sum over even dims, and one over odd.
template <class Element, int R>
void score_tile(const float* q, int dims, const Element* keys, float* scores, int64_t to_values) {
    Part even[R][PARTS] = {}, odd[R][PARTS] = {};
    constexpr int BYTES = 2 * LANES * sizeof(Element);
    for (int d = 0; d < dims; d += 2, keys += 2 * LANES) {
        prefetch((const uint8_t*)keys + to_values, BYTES);
        add_products<R>(even, odd, keys, true, [&](int r) INLINED { return q + r * dims + d; });
    }
    each<R>([&]<int r>() INLINED {
        each<PARTS>([&]<int p>() INLINED { store(scores + r * SEGMENT + p * PART, even[r][p] + odd[r][p]); });
    });
}

// R rows of weights with 16 dims' values over a segment: a running sum over even positions, one over odd.
template <class Element, int R>
void value_tile(const Segment& segment, const float* weights, int dim, float* mixed, int stride) {
    Part even[R][PARTS] = {}, odd[R][PARTS] = {};
    const int block = segment.pages.block_size;
    for (int at = 0; at < segment.length; at += block) {
        const Element* values = segment.values<Element>(at, dim);
        const int64_t to_next_keys = segment.to_next_keys<Element>(at);
        const int end = at + block < segment.length ? at + block : segment.length;
        // Beyond the context a page holds anything, NaN too: zero times it would not be zero.
        for (int s = at; s < end; s += 2, values += 2 * LANES) {
            prefetch((const uint8_t*)values + to_next_keys, 2 * LANES * sizeof(Element));
            add_products<R>(even, odd, values, s + 1 < end,
                            [&](int r) INLINED { return weights + r * SEGMENT + s; });
        }
    }
    each<R>([&]<int r>() INLINED {
        each<PARTS>([&]<int p>() INLINED { store(mixed + r * stride + dim + p * PART, even[r][p] + odd[r][p]); });
    });
}

// --- softmax, whatever computes the tiles ------------------------------------------------------------

// Of a segment's positions, those that a row sees, and how many there are up to whole vectors.
struct Seen {
    int begin, end, padded;

    int first() const { return begin / LANES * LANES; }
    int last() const { return (end + LANES - 1) / LANES * LANES; }
};

// Hide what a row does not see, and return the largest score; nothing outside first() and last() is read.
INLINE float hide(float* scores, const Seen& seen) {
    for (int i = seen.first(); i < seen.begin; ++i) scores[i] = HIDDEN;
    for (int i = seen.end; i < seen.last(); ++i) scores[i] = HIDDEN;
    Floats best = splat(HIDDEN);
    for (int i = seen.first(); i < seen.last(); i += LANES) best = maximum(best, load(scores + i));
    return largest(best);
}

// Merge a segment, of which a row saw something, into what came before it, top and `width` sums.
INLINE void merge(float& top, float* sums, float next_top, const float* next, int width) {
    const float both = next_top > top ? next_top : top;
    const Floats keep = two_to(splat(top - both)), take = two_to(splat(next_top - both));
    for (int i = 0; i < width; i += LANES) store(sums + i, fma(load(next + i), take, load(sums + i) * keep));
    top = both;
}

// Keep what a segment gave to a row, for merge_parts; its head is counted within the KV head's group.
INLINE void keep_part(const AttentionJob& job, int row, int segment, int head, float top, const float* sums) {
    float* part = job.parts->at(row, segment, job.kv_head * job.group + head);
    std::memcpy(part, sums, sizeof(float) * (job.head_dim + LANES));
    part[job.head_dim + LANES] = top;
}

// A row's output from its merged sums: the values, and lanes of the weights.
INLINE void divide(const float* sums, int dims, float* out) {
    const Floats total = splat(sum(load(sums + dims)));
    for (int d = 0; d < dims; d += LANES) store(out + d, load(sums + d) / total);
}

// --- tiles of floats -----------------------------------------------------------------------------------

template <class Element>
struct FloatTiles {
    // Tiles of three, since two sums for each row and half of 16 lanes need registers; of two tiles at a time.
    static constexpr int ROWS = PART == 16 ? 8 : PART == 8 ? 6 : 4, STEP = PART == 8 ? 3 : ROWS;
    alignas(64) float q[ROWS * MAX_DIMS];

    void set_queries(int row, const float* from, int dims, float scale) {
        for (int d = 0; d < dims; d += LANES) store(q + row * dims + d, load(from + d) * splat(scale));
    }

    void scores(const Segment& segment, int rows, int dims, float* out) {
        for (int at = 0; at < segment.length; at += LANES) {
            for (int r = 0; r < rows; r += STEP) {
                const int count = rows - r < STEP ? rows - r : STEP;
                const auto tile = count == 1   ? score_tile<Element, 1>
                                  : count <= 3 ? score_tile<Element, 3>
                                  : count == 4 ? score_tile<Element, 4> : score_tile<Element, STEP>;
                tile(q + r * dims, dims, segment.keys<Element>(at), out + r * SEGMENT + at, segment.to_values());
            }
        }
    }

    // Turn a row's scores into weights, and return the largest score; `lanes` sum the weights.
    float weigh(const Segment&, int, float* scores, const Seen& seen, float* lanes) {
        const float top = hide(scores, seen);
        Floats sums{};
        for (int i = 0; i < seen.padded; i += LANES) {
            const bool is_seen = i >= seen.first() && i < seen.last();
            const Floats weight = is_seen ? two_to(load(scores + i) - splat(top)) : Floats{};
            store(scores + i, weight);
            sums = sums + weight;
        }
        store(lanes, sums);
        return top;
    }

    void mix(const Segment& segment, int rows, int dims, const float* weights, float* out, int stride) {
        for (int d = 0; d < dims; d += LANES)
            for (int r = 0; r < rows; r += STEP) {
                const int count = rows - r < STEP ? rows - r : STEP;
                const auto tile = count == 1   ? value_tile<Element, 1>
                                  : count <= 3 ? value_tile<Element, 3>
                                  : count == 4 ? value_tile<Element, 4> : value_tile<Element, STEP>;
                tile(segment, weights + r * SEGMENT, d, out + r * stride, stride);
            }
    }
};

// --- int8 pages ----------------------------------------------------------------------------------------
//
// score = (x . key) * (query's scale * key's scale), output = (w . values) * weights' scale: x and w are
// whole numbers of 16 bits, so that sums are exact. A position's value scale is part of its weight.

// Split in two planes of bytes, x = 256 h + l, both are from -127 to 127.
constexpr float QUERY_TOP = 32639;
constexpr float WEIGHT_TOP = 32767;
// Rows that are smaller are zero: their scale's inverse could be infinite.
constexpr float TINY = 0x1p-100f;

// Round `count` floats to whole numbers up to `top`, of which each stands for the scale that is returned;
// NaN where one of them is not finite.
INLINE float quantize(const float* from, int count, float top, int32_t* to) {
    Floats largest_ones{}, poison{};
    for (int i = 0; i < count; i += LANES) {
        const Floats x = load(from + i);
        largest_ones = maximum(largest_ones, maximum(x, -x));
        poison = poison + x * Floats{};
    }
    const float most = largest(largest_ones);
    const Floats inverse = splat(most > TINY ? top / most : 0), limit = splat(top);
    for (int i = 0; i < count; i += LANES)
        store_ints(to + i, nearest(minimum(maximum(load(from + i) * inverse, -limit), limit)));
    return most / top + sum(poison);
}

// The scales of a segment's positions, side by side; zero beyond its length, where a page holds anything.
struct Scales {
    alignas(64) float keys[SEGMENT], values[SEGMENT];

    void read(const Segment& segment) {
        const int block = segment.pages.block_size, padded = (segment.length + LANES - 1) / LANES * LANES;
        const bool is_followed = segment.job.next.block_table == segment.job.block_table;  // by the next head
        for (int at = 0; at < segment.length; at += block) {
            const int count = segment.length - at < block ? segment.length - at : block;
            const float* scales = segment.scales(at);
            if (is_followed) prefetch((const uint8_t*)scales + segment.pages.page_bytes(), 8 * block);
            std::memcpy(keys + at, scales, sizeof(float) * count);
            std::memcpy(values + at, scales + block, sizeof(float) * count);
        }
        for (int i = segment.length; i < padded; ++i) keys[i] = values[i] = 0;
    }
};

// Turn a row's scores into whole weights up to WEIGHT_TOP; returns the largest score.
INLINE float weigh_whole(float* scores, const Seen& seen, const float* value_scales, float* lanes, int32_t* whole,
                         float& scale) {
    const float top = hide(scores, seen);
    Floats sums{}, most{};
    for (int i = seen.first(); i < seen.last(); i += LANES) {
        const Floats weight = two_to(load(scores + i) - splat(top));
        const Floats scaled = weight * load(value_scales + i);
        store(scores + i, scaled);
        sums = sums + weight, most = maximum(most, scaled);
    }
    store(lanes, sums);
    const float largest_one = largest(most);
    const Floats inverse = splat(largest_one > TINY ? WEIGHT_TOP / largest_one : 0);
    scale = largest_one / WEIGHT_TOP;
    for (int i = 0; i < seen.padded; i += LANES) {
        const bool is_seen = i >= seen.first() && i < seen.last();
        store_ints(whole + i, is_seen ? nearest(maximum(load(scores + i) * inverse, Floats{})) : Floats{});
    }
    return top;
}

// Whole numbers i and i + 2 of each four as a pair, then i + 1 and i + 3: as even_bytes and odd_bytes.
INLINE void pair_up(const int32_t* whole, int count, int32_t* pairs) {
    for (int i = 0; i < count; i += 4) {
        pairs[i / 2] = int32_t(uint32_t(whole[i] & 0xffff) | uint32_t(whole[i + 2]) << 16);
        pairs[i / 2 + 1] = int32_t(uint32_t(whole[i + 1] & 0xffff) | uint32_t(whole[i + 3]) << 16);
    }
}

// Add R rows of pairs, `stride` apart, times `count` / 4 times 16 lanes of four bytes; each line of them fetches the
// one that lies `to_fetched` bytes from it.
template <int R>
INLINE void add_bytes(const int32_t* pairs, int stride, const int8_t* bytes, int count, IntPart (&sums)[R][PARTS],
                      int64_t to_fetched) {
    for (int i = 0; i < count; i += 4, bytes += 4 * LANES, pairs += 2) {
        prefetch(bytes + to_fetched, 4 * LANES);
        IntPart even[PARTS], odd[PARTS];
        each<PARTS>([&]<int p>() INLINED {
            Int16Part four;
            load_to(four, bytes + 4 * PART * p);
            even[p] = even_bytes(four), odd[p] = odd_bytes(four);
        });
        each<R>([&]<int r>() INLINED {
            const IntPart first = pairs[r * stride] - IntPart{}, second = pairs[r * stride + 1] - IntPart{};
            each<PARTS>([&]<int p>() INLINED { sums[r][p] = add_pairs(sums[r][p], even[p], first); });
            each<PARTS>([&]<int p>() INLINED { sums[r][p] = add_pairs(sums[r][p], odd[p], second); });
        });
    }
}

struct Int8Tiles {
    static constexpr int ROWS = PART == 16 ? 8 : 4;
    alignas(64) int32_t q[ROWS][MAX_DIMS / 2], weights[ROWS][SEGMENT / 2];
    alignas(64) int32_t whole[SEGMENT > MAX_DIMS ? SEGMENT : MAX_DIMS];
    float q_scales[ROWS], weight_scales[ROWS];
    Scales scales_of;

    void set_queries(int row, const float* from, int dims, float scale) {
        q_scales[row] = quantize(from, dims, QUERY_TOP, whole) * scale;
        pair_up(whole, dims, q[row]);
    }

    template <int R>
    void score(const Segment& segment, int at, int dims, float* out) {
        IntPart sums[R][PARTS] = {};
        add_bytes<R>(q[0], MAX_DIMS / 2, segment.keys<int8_t>(at), dims, sums, segment.to_values());
        each<R>([&]<int r>() INLINED {
            each<PARTS>([&]<int p>() INLINED {
                Part key, scale;
                load_to(key, scales_of.keys + at + p * PART), splat_to(scale, q_scales[r]);
                store(out + r * SEGMENT + p * PART, __builtin_convertvector(sums[r][p], Part) * (scale * key));
            });
        });
    }

    void scores(const Segment& segment, int rows, int dims, float* out) {
        scales_of.read(segment);
        for (int at = 0; at < segment.length; at += LANES) {
            rows == 1   ? score<1>(segment, at, dims, out + at)
            : rows <= 3 ? score<3>(segment, at, dims, out + at)
            : rows == 4 ? score<4>(segment, at, dims, out + at)
                        : score<ROWS>(segment, at, dims, out + at);
        }
    }

    float weigh(const Segment&, int row, float* scores, const Seen& seen, float* lanes) {
        const float top = weigh_whole(scores, seen, scales_of.values, lanes, whole, weight_scales[row]);
        pair_up(whole, seen.padded, weights[row]);
        return top;
    }

    template <int R>
    void mix_dims(const Segment& segment, int dim, float* out, int stride) {
        IntPart sums[R][PARTS] = {};
        const int block = segment.pages.block_size, padded = (segment.length + 3) / 4 * 4;
        for (int at = 0; at < padded; at += block) {
            const int count = padded - at < block ? padded - at : block;
            add_bytes<R>(weights[0] + at / 2, SEGMENT / 2, segment.values<int8_t>(at, dim), count, sums,
                         segment.to_next_keys<int8_t>(at));
        }
        each<R>([&]<int r>() INLINED {
            each<PARTS>([&]<int p>() INLINED {
                Part scale;
                splat_to(scale, weight_scales[r]);
                store(out + r * stride + p * PART, __builtin_convertvector(sums[r][p], Part) * scale);
            });
        });
    }

    void mix(const Segment& segment, int rows, int dims, const float*, float* out, int stride) {
        for (int d = 0; d < dims; d += LANES)
            rows == 1   ? mix_dims<1>(segment, d, out + d, stride)
            : rows <= 3 ? mix_dims<3>(segment, d, out + d, stride)
            : rows == 4 ? mix_dims<4>(segment, d, out + d, stride)
                        : mix_dims<ROWS>(segment, d, out + d, stride);
    }
};

// --- attending -----------------------------------------------------------------------------------------

// What query row `position` sees of a segment.
INLINE Seen seen_by(int position, int window, const Segment& segment) {
    const int begin = window ? position - window + 1 - segment.start : 0, end = position + 1 - segment.start;
    return {begin > 0 ? begin : 0, end < segment.length ? end : segment.length,
            (segment.length + LANES - 1) / LANES * LANES};
}

// Attend with `count` query rows, from row `first` of the job on.
template <class Tiles>
void attend(const AttentionJob& job, const Pages& pages, int first, int count) {
    constexpr int ROWS = Tiles::ROWS;
    const int dims = job.head_dim, width = dims + LANES;
    Tiles tiles;
    int rows[ROWS], high = 0;
    float top[ROWS];
    alignas(64) float scores[ROWS * SEGMENT], mixed[ROWS * (MAX_DIMS + LANES)], sums[ROWS * (MAX_DIMS + LANES)];
    for (int r = 0; r < ROWS; ++r) {  // rows that are missing repeat the last one
        const int i = first + (r < count ? r : count - 1);
        rows[r] = job.rows[i / job.group], top[r] = HIDDEN;
        if (job.positions[rows[r]] > high) high = job.positions[rows[r]];
        const float* q = job.q + int64_t(rows[r]) * job.q_stride + i % job.group * dims;
        tiles.set_queries(r, q, dims, job.scale * LOG2_E);
    }
    std::memset(sums, 0, sizeof(float) * count * width);
    for (int s = job.first_segment; s < job.end_segment && s * SEGMENT <= high; ++s) {
        const int start = s * SEGMENT, length = high + 1 - start < SEGMENT ? high + 1 - start : SEGMENT;
        // Later rows of the job read the same pages again.
        const bool goes_on = s + 1 < job.end_segment && (s + 1) * SEGMENT <= high, is_done = first + count == job.num_rows * job.group;
        const Upcoming more{job.block_table, start + SEGMENT, high + 1, job.kv_head};
        const Segment segment{job, pages, start, length, first == 0, goes_on ? more : is_done ? job.next : Upcoming{}};
        float largest[ROWS];
        bool sees[ROWS];
        tiles.scores(segment, count, dims, scores);
        for (int r = 0; r < count; ++r) {
            const Seen seen = seen_by(job.positions[rows[r]], job.window, segment);
            sees[r] = seen.begin < seen.end;
            if (sees[r]) largest[r] = tiles.weigh(segment, r, scores + r * SEGMENT, seen, mixed + r * width + dims);
        }
        tiles.mix(segment, count, dims, scores, mixed, width);
        for (int r = 0; r < count; ++r) {
            if (!sees[r]) continue;
            if (job.parts)
                keep_part(job, rows[r], s, (first + r) % job.group, largest[r], mixed + r * width);
            else
                merge(top[r], sums + r * width, largest[r], mixed + r * width, width);
        }
    }
    for (int r = 0; r < count && !job.parts; ++r)
        divide(sums + r * width, dims, job.out + int64_t(rows[r]) * job.out_stride + (first + r) % job.group * dims);
}

template <class Tiles>
void attention_of(const AttentionJob& job, const Pages& pages) {
    const int rows = job.num_rows * job.group;
    for (int row = 0; row < rows; row += Tiles::ROWS)
        attend<Tiles>(job, pages, row, rows - row < Tiles::ROWS ? rows - row : Tiles::ROWS);
}

void attention(const AttentionJob& job, const Pages& pages) {
    const auto run = pages.element_bytes == 1   ? attention_of<Int8Tiles>
                     : pages.element_bytes == 2 ? attention_of<FloatTiles<uint16_t>>
                                                : attention_of<FloatTiles<float>>;
    run(job, pages);
}

void merge_parts(const Parts& parts, int row, int position, int window, float* out) {
    const int dims = parts.head_dim, width = dims + LANES;
    alignas(64) float sums[MAX_DIMS + LANES];
    for (int head = 0; head < parts.heads; ++head) {
        float top = HIDDEN;
        std::memset(sums, 0, sizeof(float) * width);
        for (int s = octavo::first_segment(position, window); s < octavo::end_segment(position); ++s) {
            const float* part = parts.at(row, s, head);
            merge(top, sums, part[width], part, width);
        }
        divide(sums, dims, out + head * dims);
    }
}

// --- writing ---------------------------------------------------------------------------------------

// A group is how many dims of a position's keys, or positions of a dim's values, lie side by side.
template <int group, class Element, class Number>
INLINE void scatter_kv(const Number* k, const Number* v, Element* page, int slot, const Pages& pages,
                       Element (*to)(Number)) {
    Element* keys = page + int64_t(slot / 16) * pages.head_dim * 16 + slot % 16 * group;
    Element* values = page + pages.page_elements() + slot / group * 16 * group + slot % group;
    for (int d = 0; d < pages.head_dim; d += group, keys += 16 * group)
        for (int i = 0; i < group; ++i) keys[i] = to(k[d + i]);
    for (int d = 0; d < pages.head_dim; d += 16, values += 16 * pages.block_size)
        for (int i = 0; i < 16; ++i) values[group * i] = to(v[d + i]);
}

INLINE int8_t to_int8(int32_t x) { return int8_t(x); }
INLINE float to_float(float x) { return x; }

INLINE void write_int8(const float* k, const float* v, uint8_t* page, int slot, const Pages& pages) {
    alignas(64) int32_t keys[MAX_DIMS], values[MAX_DIMS];
    float* scales = (float*)(page + 2 * pages.page_elements());
    scales[slot] = quantize(k, pages.head_dim, 127, keys);
    scales[pages.block_size + slot] = quantize(v, pages.head_dim, 127, values);
    scatter_kv<4>(keys, values, (int8_t*)page, slot, pages, to_int8);
}

void write_kv(const float* k, const float* v, uint8_t* page, int slot, const Pages& pages) {
    if (pages.element_bytes == 1)
        write_int8(k, v, page, slot, pages);
    else if (pages.element_bytes == 2)
        scatter_kv<2>(k, v, (uint16_t*)page, slot, pages, to_bf16);
    else
        scatter_kv<2>(k, v, (float*)page, slot, pages, to_float);
}

}  // namespace

// The Python side of step.h: the arrays of a batch in, a step that may be run out.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string_view>

#include "limits.h"

namespace nb = nanobind;

namespace octavo {

namespace {

// An array of contiguous int32 with so many dimensions, or nothing.
class Ints {
  public:
    Ints(nb::handle array, int num_dims) {
        has_buffer_ = PyObject_GetBuffer(array.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0;
        if (!has_buffer_) PyErr_Clear();
        is_sound = has_buffer_ && std::string_view(view_.format) == "i" && view_.ndim == num_dims;
    }
    ~Ints() {
        if (has_buffer_) PyBuffer_Release(&view_);
    }
    Ints(const Ints&) = delete;

    int32_t length(int dimension = 0) const { return int32_t(view_.shape[dimension]); }
    const int32_t* data() const { return static_cast<const int32_t*>(view_.buf); }
    std::span<const int32_t> all() const { return {data(), size_t(view_.len) / sizeof(int32_t)}; }

    bool is_sound = false;

  private:
    Py_buffer view_{};
    bool has_buffer_ = false;
};

// The step of a batch's arrays, which it borrows; None if the limits refuse it.
std::optional<Step> checked_step(const Limits& limits, nb::handle token_ids, nb::handle positions,
                                 nb::handle chunk_starts, nb::handle block_tables, nb::handle context_lengths,
                                 nb::handle copies, nb::handle state_rows, nb::handle logit_rows) {
    const Ints ids(token_ids, 1), places(positions, 1), starts(chunk_starts, 1), tables(block_tables, 2),
        contexts(context_lengths, 1), pairs(copies, 2), states(state_rows, 1), rows(logit_rows, 1);
    for (const Ints* array : {&ids, &places, &starts, &tables, &contexts, &pairs, &states, &rows})
        if (!array->is_sound) return std::nullopt;
    const int32_t num_chunks = contexts.length();
    if (places.length() != ids.length() || starts.length() != num_chunks + 1 || tables.length() != num_chunks ||
        pairs.length(1) != 2)
        return std::nullopt;
    const Step step{ids.length(), num_chunks,  tables.length(1), rows.length(),   ids.data(),
                    places.data(), starts.data(), tables.data(), contexts.data(), rows.data()};
    return limits.allow(step, pairs.all(), states.all()) ? std::optional(step) : std::nullopt;
}

}  // namespace

void bind_steps(nb::module_& m) {
    // A step made by hand, of addresses and sizes: nothing is checked.
    nb::class_<Step>(m, "Step").def(
        "__init__", [](Step* step, const std::vector<uint64_t>& arrays, const std::vector<int>& sizes) {
            const auto at = [&](int i) { return reinterpret_cast<const int32_t*>(arrays.at(i)); };
            new (step) Step{sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3), at(0), at(1), at(2), at(3), at(4), at(5)};
        });
    nb::class_<Limits>(m, "Limits")
        .def("__init__",
             [](Limits* limits, int num_tokens, int num_blocks, int block_size, int max_rows, int max_positions) {
                 new (limits) Limits{num_tokens, num_blocks, block_size, max_rows, max_positions};
             })
        .def("step", checked_step);
}

}  // namespace octavo

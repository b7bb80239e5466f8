// The Python side of sample.h: lists in, lists out.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "sample.h"

namespace nb = nanobind;

namespace octavo {

namespace {

// (token id, log-probability, rank, top ids, their log-probabilities), or None where there is none.
nb::object report_of(const Draw& draw) {
    if (!draw.reports || draw.failed()) return nb::none();
    const Report& report = draw.report;
    return nb::make_tuple(report.token_id, report.logprob, report.rank, report.top_ids, report.top_logprobs);
}

nb::list reports_of(const std::vector<Draw>& draws) {
    nb::list reports;
    for (const Draw& draw : draws) reports.append(report_of(draw));
    return reports;
}

// (place, its largest logit) of each draw whose logits are no numbers; (place, None) where no token is left.
nb::list failures_of(const std::vector<Draw>& draws) {
    nb::list failures;
    for (size_t i = 0; i < draws.size(); ++i)
        if (draws[i].failed())
            failures.append(nb::make_tuple(i, draws[i].is_stuck ? nb::none() : nb::object(nb::float_(draws[i].largest))));
    return failures;
}

nb::list token_ids_of(const std::vector<Draw>& draws) {
    nb::list ids;
    for (const Draw& draw : draws) ids.append(draw.report.token_id);
    return ids;
}

// All three, in one call: Python's own time between steps counts.
nb::tuple results_of(const std::vector<Draw>& draws) {
    return nb::make_tuple(token_ids_of(draws), reports_of(draws), failures_of(draws));
}

}  // namespace

void bind_sampling(nb::module_& m) {
    nb::class_<Sampling>(m, "Sampling")
        .def(nb::init<>())
        .def_rw("temperature", &Sampling::temperature)
        .def_rw("top_p", &Sampling::top_p)
        .def_rw("min_p", &Sampling::min_p)
        .def_rw("top_k", &Sampling::top_k)
        .def_rw("repetition_penalty", &Sampling::repetition_penalty)
        .def_rw("presence_penalty", &Sampling::presence_penalty)
        .def_rw("frequency_penalty", &Sampling::frequency_penalty)
        .def_rw("seed", &Sampling::seed)
        .def_rw("min_tokens", &Sampling::min_tokens)
        .def_rw("reports", &Sampling::reports)
        .def_rw("num_top", &Sampling::num_top)
        .def_rw("is_limited", &Sampling::is_limited)
        .def_rw("allowed", &Sampling::allowed)
        .def_rw("stop_ids", &Sampling::stop_ids)
        .def_rw("biased_ids", &Sampling::biased_ids)
        .def_rw("biases", &Sampling::biases)
        .def_rw("prompt", &Sampling::prompt)
        .def_rw("bad_words", &Sampling::bad_words);
    nb::class_<Draws>(m, "Draws")
        .def(nb::init<int, int>(), nb::arg("vocab_size"), nb::arg("num_rows"))
        .def("add_samples", &Draws::add_samples, nb::keep_alive<1, 2>())
        .def("add_known", &Draws::add_known)
        .def("set_history", &Draws::set_history)
        .def("set_mask", [](Draws& draws, size_t place, uint64_t address, size_t num_words) {
            draws.set_mask(place, reinterpret_cast<const uint32_t*>(address), num_words);
        })
        .def("drawn", [](const Draws& draws) { return results_of(draws.samples); })
        .def("reported", [](const Draws& draws) { return results_of(draws.known); });
}

}  // namespace octavo

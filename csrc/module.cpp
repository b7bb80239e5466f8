// The Python module octavo.native._octavo: a tape, packing, and which instruction sets there are.
//
// Weights and values cross as raw addresses: checking them is the caller's part (octavo/executors/cpu.py). A
// step's arrays are checked here, in step_binding.cpp.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "cpu.h"
#include "pack.h"
#include "sample.h"
#include "tape.h"

namespace nb = nanobind;
using namespace octavo;

namespace octavo {
void bind_sampling(nb::module_& m);  // sample_binding.cpp
void bind_steps(nb::module_& m);     // step_binding.cpp
}

namespace {

template <class T>
T* pointer(uint64_t address) {
    return reinterpret_cast<T*>(address);
}

Format format_of(const std::string& name) {
    if (name == "bf16") return Format::bf16;
    if (name == "int8") return Format::int8;
    if (name == "int4") return Format::int4;
    if (name == "int8_group") return Format::int8_group;
    if (name == "int4_group") return Format::int4_group;
    throw std::invalid_argument("no weight format " + name);
}

const StoredType& stored_of(const std::string& name) {
    const StoredType* type = find_stored(name);
    if (!type) throw std::invalid_argument("no stored type " + name);
    return *type;
}

const Kernels& kernels_of(const std::string& name) {
    const Kernels* kernels = find_kernels(name);
    if (!kernels) throw std::invalid_argument("no instruction set " + name + " on this machine");
    return *kernels;
}

template <auto pack>
void from_floats(uint64_t rows, int first, int count, int inputs, uint64_t panels) {
    nb::gil_scoped_release release;
    pack(pointer<const float>(rows), first, count, inputs, pointer<uint8_t>(panels));
}

template <auto pack>
void from_codes(uint64_t nibbles, uint64_t scales, uint64_t minima, int first, int count, int inputs, uint64_t panels) {
    nb::gil_scoped_release release;
    pack(pointer<const uint8_t>(nibbles), pointer<const uint16_t>(scales), pointer<const uint16_t>(minima), first,
         count, inputs, pointer<uint8_t>(panels));
}

}  // namespace

NB_MODULE(_octavo, m) {
    m.def("instruction_sets", &instruction_sets, "Those that this build and this machine have, best first.");
    m.attr("emulated") = emulated_sets();  // sets that only a build for tests has
    m.def("panel_bytes", [](const std::string& f, int inputs) { return panel_bytes(format_of(f), inputs); });
    m.def("pack_bf16", from_floats<pack_bf16>);
    m.def("pack_int8", from_floats<pack_int8>);
    m.def("pack_int8_group", from_floats<pack_int8_group>);
    m.def("pack_int4", from_codes<pack_int4>);
    m.def("pack_int4_group", from_codes<pack_int4_group>);
    m.def("pack_stored", [](const std::string& stored, const std::string& format, uint64_t rows, int first, int count,
                            int inputs, uint64_t panels) {
        const StoredType& type = stored_of(stored);
        const Format chosen = format_of(format);
        nb::gil_scoped_release release;
        pack_stored(type, chosen, pointer<const uint8_t>(rows), first, count, inputs, pointer<uint8_t>(panels));
    });
    m.def("read_stored", [](const std::string& stored, uint64_t row, int inputs, uint64_t out) {
        stored_of(stored).floats(pointer<const uint8_t>(row), inputs, pointer<float>(out));
    });
    m.def("unpack_row", [](uint64_t panels, int outputs, int inputs, const std::string& format, int row, uint64_t out) {
        unpack_row(Matrix{pointer<const uint8_t>(panels), outputs, inputs, format_of(format)}, row, pointer<float>(out));
    });

    nb::class_<Value>(m, "Value").def("__init__", [](Value* value, uint64_t base, int stride, int width) {
        new (value) Value{pointer<float>(base), stride, width};
    });
    nb::class_<Matrix>(m, "Matrix").def(
        "__init__", [](Matrix* matrix, uint64_t panels, int outputs, int inputs, const std::string& format) {
            new (matrix) Matrix{pointer<const uint8_t>(panels), outputs, inputs, format_of(format)};
        });
    nb::enum_<Kind>(m, "Kind")
        .value("embed", Kind::embed)
        .value("rms_norm", Kind::rms_norm)
        .value("add_rms_norm", Kind::add_rms_norm)
        .value("linear", Kind::linear)
        .value("rope", Kind::rope)
        .value("write_kv", Kind::write_kv)
        .value("attention", Kind::attention)
        .value("gated_activation", Kind::gated_activation)
        .value("add", Kind::add)
        .value("select_rows", Kind::select_rows)
        .value("sample", Kind::sample);
    nb::class_<Operation>(m, "Operation")
        .def("__init__", [](Operation* op, Kind kind) {
            new (op) Operation;
            op->kind = kind;
        })
        .def_rw("x", &Operation::x)
        .def_rw("y", &Operation::y)
        .def_rw("out", &Operation::out)
        .def_rw("total", &Operation::total)
        .def_rw("matrices", &Operation::matrices)
        .def_rw("heads", &Operation::heads)
        .def_rw("kv_heads", &Operation::kv_heads)
        .def_rw("head_dim", &Operation::head_dim)
        .def_rw("layer", &Operation::layer)
        .def_rw("window", &Operation::window)
        .def_rw("gate", &Operation::gate)
        .def_rw("eps", &Operation::eps)
        .def_rw("scale", &Operation::scale)
        .def_rw("is_gated", &Operation::is_gated)
        .def("set_weight", [](Operation& op, uint64_t address) { op.weight = pointer<const float>(address); })
        .def("set_sines", [](Operation& op, uint64_t address) { op.sines = pointer<const float>(address); })
        .def("set_biases", [](Operation& op, const std::vector<uint64_t>& addresses) {
            op.biases.clear();
            for (uint64_t address : addresses) op.biases.push_back(pointer<const float>(address));
        });
    bind_sampling(m);
    bind_steps(m);
    nb::class_<Tape>(m, "Tape")
        .def("__init__",
             [](Tape* tape, const std::string& isa, uint64_t pages, int num_layers, int block_size, int kv_heads,
                int head_dim, int element_bytes, int max_rows, int num_threads) {
                 const Pages pool{pointer<uint8_t>(pages), num_layers, block_size, kv_heads, head_dim, element_bytes};
                 new (tape) Tape(kernels_of(isa), pool, max_rows, num_threads);
             })
        .def("add", &Tape::add)
        .def("counters", [](const Tape& tape) {
            const Counters& c = tape.counters();
            return std::vector<int64_t>{c.flops, c.weights, c.kv_read, c.kv_written};
        })
        .def("run", [](Tape& tape, const Step& step, int first, int end) {
            nb::gil_scoped_release release;
            tape.run(step, first, end);
        })
        .def("sample", [](Tape& tape, Step step, int head_rows, Draws& draws) {
            step.draws = &draws;
            nb::gil_scoped_release release;
            tape.run_sliced(step, head_rows);
        });
}

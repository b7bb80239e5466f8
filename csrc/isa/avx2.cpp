#include "operators.h"

namespace octavo {

const Kernels* avx2_kernels() {
    static constexpr Kernels kernels = {"avx2", rms_norm, add, gated_activation, rope,
                                        prepare_any_row, any_product, write_kv, attention, merge_parts,
                                        maxima, maxima_wide, weigh, weigh_wide};
    return &kernels;
}

}  // namespace octavo

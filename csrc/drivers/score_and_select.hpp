// select_budget by entropy on scores that are computed only where they can matter.
#pragma once

#include <cstdint>

#include "drivers/pairwise.hpp"
#include "drivers/select.hpp"

namespace mdmi {

// The answer of score_all followed by select_budget, to the last bit. Returns how many pairs were scored.
int64_t score_and_select(const PackedNetwork& network, const Halves& halves, const PairRule& pair_rule,
                         const Positions& positions, const BudgetRule& rule, uint8_t* selected, double* spent,
                         int threads);

}  // namespace mdmi

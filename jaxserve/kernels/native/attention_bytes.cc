// Attention over pools of one byte a number, beside attention.cc so that both compile at once.

#include "attention.h"

namespace jaxserve::attention {

void attend_int8(const Call& call, const Arrays& arrays) { attend_pool<int8_t>(call, arrays); }

void attend_float8(const Call& call, const Arrays& arrays) { attend_pool<Float8>(call, arrays); }

}  // namespace jaxserve::attention

// Attention over a pool of int8.

#include "attention_call.h"

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_paged_attention_int8,
                              jaxserve::attention::Attend<int8_t>,
                              jaxserve::attention::bind());

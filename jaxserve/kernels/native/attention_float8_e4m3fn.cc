// Attention over a pool of float8_e4m3fn.

#include "attention_call.h"

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_paged_attention_float8_e4m3fn,
                              jaxserve::attention::Attend<jaxserve::Float8>,
                              jaxserve::attention::bind());

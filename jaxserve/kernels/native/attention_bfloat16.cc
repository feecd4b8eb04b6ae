// Attention over a pool of bfloat16.

#include "attention_call.h"

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_paged_attention_bfloat16,
                              jaxserve::attention::Attend<jaxserve::BFloat16>,
                              jaxserve::attention::bind());

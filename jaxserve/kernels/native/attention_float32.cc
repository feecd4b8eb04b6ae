// Attention over a pool of float32.

#include "attention_call.h"

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_paged_attention_float32,
                              jaxserve::attention::Attend<float>,
                              jaxserve::attention::bind());

// What makes one team of the libraries of a process; it is in each of them.

#include "parallel.h"

#define JAXSERVE_SEEN extern "C" __attribute__((visibility("default")))  // though Team is hidden

JAXSERVE_SEEN jaxserve::Team& jaxserve_get_team() { return jaxserve::Team::get(); }

// Given another library's `jaxserve_get_team`.
JAXSERVE_SEEN void jaxserve_join_team(jaxserve::Team& (*get)()) { jaxserve::Team::join(get); }

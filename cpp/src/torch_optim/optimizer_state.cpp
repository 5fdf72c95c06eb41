#include "optimizer_state.h"

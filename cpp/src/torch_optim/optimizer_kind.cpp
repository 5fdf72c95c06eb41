#include "optimizer_kind.h"

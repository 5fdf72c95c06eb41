#include "rule_view.h"

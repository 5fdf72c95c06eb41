#include <fp16core/state_dict.h>

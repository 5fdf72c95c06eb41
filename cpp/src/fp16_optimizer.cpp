#include <fp16core/fp16_optimizer.h>

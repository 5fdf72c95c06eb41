#include <fp16core/checkpoint.h>

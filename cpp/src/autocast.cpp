#include <fp16core/autocast.h>

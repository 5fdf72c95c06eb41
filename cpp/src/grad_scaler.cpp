#include <fp16core/grad_scaler.h>

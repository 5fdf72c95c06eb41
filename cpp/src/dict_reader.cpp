#include "dict_reader.h"

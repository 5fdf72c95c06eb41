#include "pickle_reader.h"

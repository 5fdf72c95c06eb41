// Reads pickled data without executing anything.

#pragma once

// The export macro of libfp16core.

#pragma once

#if defined(_WIN32)
#if defined(FP16CORE_BUILDING)
#define FP16CORE_API __declspec(dllexport)
#else
#define FP16CORE_API __declspec(dllimport)
#endif
#else
#define FP16CORE_API __attribute__((visibility("default")))
#endif

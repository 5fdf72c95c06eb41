// The arithmetic of update rules for a register of numbers, with the bits that
// math/arithmetic.h gives for one.

#pragma once

#include "vectors.h"

#include <cmath>

namespace fp16core::detail::cpu {
namespace CPU_CAPABILITY {

template <typename Number>
struct VectorMath {
  using Real = Number;
  using Value = Vectorized<Number>;

  static Value of(Real number) { return Value(number); }

  static Value fma(const Value& a, const Value& b, const Value& c) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
    return at::vec::fmadd(a, b, c);
#else
    // ATen's is a product and a sum here, rounded twice.
    Real x[Value::size()], y[Value::size()], z[Value::size()];
    a.store(x);
    b.store(y);
    c.store(z);
    for (int i = 0; i < Value::size(); ++i) {
      x[i] = std::fma(x[i], y[i], z[i]);
    }
    return Value::loadu(x);
#endif
  }

  static Value sqrt(const Value& x) { return x.sqrt(); }
  static Value abs(const Value& x) { return x.abs(); }
  static Value maximum(const Value& a, const Value& b) {
    return at::vec::maximum(a, b);
  }
  static Value sign(const Value& x) {
    const Value zero(0);
    const Value positive = Value::blendv(zero, Value(1), x > zero);
    return Value::blendv(positive, Value(-1), x < zero);
  }
};

} // namespace CPU_CAPABILITY
} // namespace fp16core::detail::cpu

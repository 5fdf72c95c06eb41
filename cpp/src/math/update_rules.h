// The list of update rules. A rule is a file beside this one and its entry
// here; CONTRIBUTING.md shows how to add one.

#pragma once

#include "adagrad.h"
#include "adam.h"
#include "adamax.h"
#include "lion.h"
#include "nadam.h"
#include "rmsprop.h"
#include "sgd.h"

namespace fp16core::detail {

template <typename... Rules>
struct RuleList {
  static constexpr std::size_t kSize = sizeof...(Rules);

  /// Returns { make.operator()<Rule>()... }, in the order of the rules.
  template <typename Make>
  static constexpr auto map(const Make& make) {
    return std::array{make.template operator()<Rules>()...};
  }
};

using AllRules = RuleList<Sgd, Adam, Adagrad, RmsProp, NAdam, Adamax, Lion>;

} // namespace fp16core::detail

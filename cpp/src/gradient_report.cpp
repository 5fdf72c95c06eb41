#include <fp16core/gradient_report.h>

#include "parameter_text.h"

#include <algorithm>
#include <iterator>
#include <sstream>

namespace fp16core {

const TensorReport* GradientReport::first_offender() const {
  const auto found =
      std::find_if(tensors.begin(), tensors.end(), [](const TensorReport& t) {
        return t.overflows();
      });
  return found == tensors.end() ? nullptr : &*found;
}

std::vector<TensorReport> GradientReport::culprits() const {
  std::vector<TensorReport> culprits;
  std::copy_if(
      tensors.begin(),
      tensors.end(),
      std::back_inserter(culprits),
      [](const TensorReport& t) { return t.overflows(); });
  return culprits;
}

std::string GradientReport::describe(const TensorReport& tensor) {
  std::ostringstream text;
  text << detail::describe_parameter(
              tensor.group,
              tensor.index,
              tensor.parameter,
              tensor.name)
       << ", with " << tensor.inf_count << " inf and " << tensor.nan_count
       << " NaN";
  return text.str();
}

} // namespace fp16core

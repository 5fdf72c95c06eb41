#include <fp16core/gradient_report.h>

#include "parameter_text.h"

#include <algorithm>
#include <sstream>

namespace fp16core {

const TensorReport* GradientReport::first_offender() const {
  const auto found =
      std::find_if(tensors.begin(), tensors.end(), [](const TensorReport& t) {
        return t.inf_count + t.nan_count > 0;
      });
  return found == tensors.end() ? nullptr : &*found;
}

std::string GradientReport::describe(const TensorReport& tensor) {
  std::ostringstream text;
  text << detail::describe_parameter(
              tensor.group,
              tensor.index,
              tensor.parameter)
       << ", with " << tensor.inf_count << " inf and " << tensor.nan_count
       << " NaN";
  return text.str();
}

} // namespace fp16core

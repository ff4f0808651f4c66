#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ddprun {

/// What a prefix template can name. Text, because a folded line belongs to several ranks ("0-3").
struct PrefixValues {
    std::string rank, local_rank, role_name, host, time;
};

/// "[${rank}]: " taken apart once. Unknown variables stay as they are written, as torchrun leaves them.
class PrefixTemplate {
  public:
    explicit PrefixTemplate(std::string_view text);
    [[nodiscard]] std::string render(const PrefixValues& values) const;
    /// False: the prefix of a stream never changes.
    [[nodiscard]] bool names_time() const { return names_time_; }

  private:
    struct Part {
        std::string literal;
        std::string PrefixValues::*variable;  ///< null for a literal
    };
    std::vector<Part> parts_;
    bool names_time_ = false;
};

/// The prefix in the colour of this rank, with the reset behind it.
std::string colored_prefix(const std::string& prefix, int rank);

}  // namespace ddprun

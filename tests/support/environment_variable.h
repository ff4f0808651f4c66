#pragma once

#include <cstdlib>
#include <string>

/// For tests of what reads its environment.
namespace ddp::testing {

/// Sets an environment variable; the destructor removes it.
class Variable {
  public:
    Variable(const char* name, const std::string& value) : name_(name) { ::setenv(name, value.c_str(), 1); }
    ~Variable() { ::unsetenv(name_); }
    Variable(const Variable&) = delete;
    Variable& operator=(const Variable&) = delete;

  private:
    const char* name_;
};

}  // namespace ddp::testing

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "env/unique_fd.h"
#include "tests/support/run_program.h"

namespace ddprun::test {

/// Several hosts on this machine, for jobs on several nodes: node00, node01, … Each has its own processes (a
/// PID namespace), host name, /tmp, /var/tmp, /run, /dev/shm, loopback and an eth0 on one switch; its
/// /etc/hosts names all of them. As on a cluster they share the home directory: an empty one, which is also
/// the test's while this object lives.
///
/// A host has no cgroups. Nothing has a name outside, so everything ends with this object, also when the test
/// is killed. A process has one at a time, and only one thread while it is made. Throws std::runtime_error if
/// why_not() has a reason.
class Hosts {
  public:
    /// The reason why this machine cannot have hosts; nothing if it can.
    static std::optional<std::string> why_not();

    /// Router is for kernels without bridges; a cut cable is silent there too. Slow delays each frame by its
    /// own time, so that frames overtake each other (tests/support/slow_switch.h).
    enum class Switch { Bridge, Router, Slow };
    explicit Hosts(int count, Switch made_of = Switch::Bridge);
    ~Hosts();
    Hosts(const Hosts&) = delete;
    Hosts& operator=(const Hosts&) = delete;

    [[nodiscard]] int count() const { return static_cast<int>(hosts_.size()); }
    [[nodiscard]] static std::string name(int host);     ///< "node00"
    [[nodiscard]] static std::string address(int host);  ///< "10.77.0.1", of eth0

    /// The command that runs `argv` on a host, from the test or from a program of any host. It ends like the
    /// program and forwards signals; if it is killed, the program gets SIGKILL. Other processes of the host
    /// are not affected. The program leads a session and has the environment of the command, except for HOME
    /// and variables that name directories outside.
    [[nodiscard]] std::vector<std::string> command(int host, const std::vector<std::string>& argv) const;

    /// The socket for on_host (tests/support/on_host.cpp), for other commands than the one above.
    [[nodiscard]] std::string socket_path(int host) const { return shared_ + "/.hosts/" + name(host); }

    /// A directory with the same path for the test and all hosts; HOME is in it.
    [[nodiscard]] const std::string& shared() const { return shared_; }
    [[nodiscard]] const std::string& home() const { return home_; }

    /// Drops all packets of the host silently; mend_cable() lets them arrive again.
    void cut_cable(int host);
    void mend_cable(int host);
    /// Cuts the cable and kills all processes, for good.
    void power_off(int host);

  private:
    class Mount;
    class Host;
    class SlowSwitch;
    void ip_in_switch(const std::string& commands) const;
    [[nodiscard]] std::string port_up(int host) const;

    const Switch made_of_;
    std::string shared_, home_;
    std::vector<std::unique_ptr<Mount>> mounts_;
    UniqueFd switch_;
    std::vector<std::unique_ptr<Host>> hosts_;
    std::unique_ptr<SlowSwitch> slow_;
};

}  // namespace ddprun::test

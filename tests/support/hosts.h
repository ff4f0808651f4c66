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
/// /etc/hosts knows all of them. As on a cluster they share the home directory: ours, which while this object
/// lives is an empty one, also for the test.
///
/// There are no cgroups in a host. Nothing has a name outside: all goes with this object, and with the test
/// when it is killed. One at a time in a process, which has one thread while it is made. Throws
/// std::runtime_error where why_not() would have told.
class Hosts {
  public:
    /// Why this machine cannot have hosts; nothing where it can.
    static std::optional<std::string> why_not();

    /// A kernel without bridges takes Router: a cut cable is the same silence. Slow delays each frame on its
    /// own, so that they overtake each other (tests/support/slow_switch.h).
    enum class Switch { Bridge, Router, Slow };
    explicit Hosts(int count, Switch made_of = Switch::Bridge);
    ~Hosts();
    Hosts(const Hosts&) = delete;
    Hosts& operator=(const Hosts&) = delete;

    [[nodiscard]] int count() const { return static_cast<int>(hosts_.size()); }
    [[nodiscard]] static std::string name(int host);     ///< "node00"
    [[nodiscard]] static std::string address(int host);  ///< "10.77.0.1", of eth0

    /// The command that runs `argv` on a host, from the test or from a program of any host. It ends as the
    /// program does, passes signals on, and its SIGKILL is the program's; other processes of the host go on,
    /// also when it ends. The program leads a session, has the environment of who runs the command, but for
    /// HOME and what names places here.
    [[nodiscard]] std::vector<std::string> command(int host, const std::vector<std::string>& argv) const;

    /// For on_host (tests/support/on_host.cpp), where the command above is not it.
    [[nodiscard]] std::string socket_path(int host) const { return shared_ + "/.hosts/" + name(host); }

    /// The same directory, by the same path, for the test and all hosts; HOME lies in it.
    [[nodiscard]] const std::string& shared() const { return shared_; }
    [[nodiscard]] const std::string& home() const { return home_; }

    /// Packets are lost from now on, without a word to either side; and arrive again.
    void cut_cable(int host);
    void mend_cable(int host);
    /// The cable is cut and all processes are gone. For good.
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

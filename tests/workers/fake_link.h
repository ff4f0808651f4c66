#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ddp/net/link.h"

namespace ddp::testing {

/// Links between threads of this process, with properties that transports may have but libfabric's tcp lacks.
class FakeNetwork {
  public:
    struct Habits {
        std::uint64_t tag_mask = ~std::uint64_t{0};  ///< other tags are refused, as by cxi
        bool garbles_send_lengths = false;           ///< fi_cq(3) defines the length of receives only
        int refusals = 0;                            ///< polls in which a message cannot begin (EAGAIN)
        std::size_t most_at_once = SIZE_MAX;         ///< bytes of a message that one poll moves
    };
    FakeNetwork() = default;
    explicit FakeNetwork(Habits habits) : habits_(habits) {}

    std::unique_ptr<net::Link> open() {
        const std::lock_guard lock(mutex_);
        return std::make_unique<End>(*this, std::to_string(ends_++));
    }
    /// The number of messages that were sent.
    std::size_t messages() {
        const std::lock_guard lock(mutex_);
        return sent_;
    }
    /// Breaks the connections of the link with that address at once.
    void lose(const std::string& address) {
        const std::lock_guard lock(mutex_);
        lost_.insert(address);
        changed_.notify_all();
    }

    /// Breaks the connection between the links with these addresses.
    void cut(const std::string& one, const std::string& other) {
        const std::lock_guard lock(mutex_);
        cut_.insert({one, other});
        cut_.insert({other, one});
        changed_.notify_all();
    }

  private:
    /// A send and its receive, once both exist.
    struct Message {
        std::string from, to;
        std::uint64_t tag;
        std::span<const std::byte> bytes;
        std::span<std::byte> into;
        std::size_t moved = 0;
        int refusals = 0;
        net::Transfer *sender = nullptr, *receiver = nullptr;  ///< null: not begun, done, or abandoned
        bool has_sender = false, has_receiver = false;

        [[nodiscard]] bool is_whole() const { return has_sender && has_receiver && moved == bytes.size(); }
    };

    class End final : public net::Link {
      public:
        End(FakeNetwork& network, std::string address) : network_(network), address_(std::move(address)) {}
        ~End() override { abandon(); }

        std::string describe() const override { return "a fake"; }
        std::string address() const override { return address_; }
        std::uint64_t tag_mask() const override { return network_.habits_.tag_mask; }
        void connect(const std::vector<std::string>& addresses) override { peers_ = addresses; }

        void send(std::size_t peer, std::uint64_t tag, std::span<const std::byte> from,
                  net::Transfer& transfer) override {
            if (refuses(tag, transfer)) return;
            const std::lock_guard lock(network_.mutex_);
            Message& message = network_.find(address_, peers_[peer], tag, &Message::has_sender);
            message.bytes = from;
            ++network_.sent_;
            message.sender = &transfer;
        }
        void receive(std::size_t peer, std::uint64_t tag, std::span<std::byte> into,
                     net::Transfer& transfer) override {
            if (refuses(tag, transfer)) return;
            const std::lock_guard lock(network_.mutex_);
            Message& message = network_.find(peers_[peer], address_, tag, &Message::has_receiver);
            message.into = into;
            message.receiver = &transfer;
        }

        bool progress() override {
            const std::lock_guard lock(network_.mutex_);
            bool any = false;
            for (Message& message : network_.messages_) {
                if (message.from == address_ && message.sender != nullptr)
                    any |= move(message, message.sender);
                else if (message.to == address_ && message.receiver != nullptr)
                    any |= move(message, message.receiver);
            }
            network_.forget_ended();
            if (any) network_.changed_.notify_all();
            return any;
        }
        void sleep(std::chrono::milliseconds most) override {
            std::unique_lock lock(network_.mutex_);
            network_.changed_.wait_for(lock, std::min(most, std::chrono::milliseconds(1)));
        }
        void abandon() override {
            const std::lock_guard lock(network_.mutex_);
            network_.lost_.insert(address_);
            for (Message& message : network_.messages_) {
                if (message.from == address_) message.sender = nullptr;
                if (message.to == address_) message.receiver = nullptr;
            }
            network_.forget_ended();
        }

      private:
        bool refuses(std::uint64_t tag, net::Transfer& transfer) const {
            if ((tag & ~network_.habits_.tag_mask) == 0) return false;
            transfer.failure = "Invalid argument";
            return transfer.done = true;
        }
        /// True when this side's transfer is done.
        bool move(Message& message, net::Transfer*& ours) {
            const bool is_lost = network_.lost_.contains(message.from) ||
                                 network_.lost_.contains(message.to) ||
                                 network_.cut_.contains({message.from, message.to});
            const bool both = message.sender != nullptr && message.receiver != nullptr;
            if (both && !is_lost && message.refusals++ >= network_.habits_.refusals) {
                const std::size_t room = std::min(message.into.size(), message.bytes.size());
                const std::size_t begin = std::min(message.moved, room);
                const std::size_t step =
                    std::min(network_.habits_.most_at_once, message.bytes.size() - message.moved);
                const std::size_t end = std::min(begin + step, room);
                if (end > begin)
                    std::memcpy(message.into.data() + begin, message.bytes.data() + begin, end - begin);
                message.moved += step;
            }
            if (message.is_whole()) {
                const bool sent = ours == message.sender;
                ours->bytes =
                    sent && network_.habits_.garbles_send_lengths ? 0xDEADBEEF : message.bytes.size();
            } else if (is_lost) {
                ours->failure = "Connection reset by peer";
            } else {
                return false;
            }
            ours->done = true;
            ours = nullptr;
            return true;
        }

        FakeNetwork& network_;
        const std::string address_;
        std::vector<std::string> peers_;
    };

    /// The oldest message that lacks this side, or a new one.
    Message& find(const std::string& from, const std::string& to, std::uint64_t tag, bool Message::*side) {
        const auto fits = [&](const Message& one) {
            return one.from == from && one.to == to && one.tag == tag && !(one.*side);
        };
        auto found = std::find_if(messages_.begin(), messages_.end(), fits);
        if (found == messages_.end()) {
            messages_.push_back({});
            found = std::prev(messages_.end());
            found->from = from;
            found->to = to;
            found->tag = tag;
        }
        (*found).*side = true;
        changed_.notify_all();
        return *found;
    }

    void forget_ended() {
        messages_.remove_if(
            [](const Message& one) { return one.sender == nullptr && one.receiver == nullptr; });
    }

    const Habits habits_{};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::list<Message> messages_;
    std::set<std::string> lost_;
    std::set<std::pair<std::string, std::string>> cut_;
    int ends_ = 0;
    std::size_t sent_ = 0;
};

}  // namespace ddp::testing

#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ddp/process_group.h"

/// Collectives of every type that nlohmann/json converts: numbers, strings, lists, maps, and types with their
/// own to_json and from_json. Objects travel as CBOR. Blocking; host memory, whatever the group's device. For
/// rare exchanges: settings, lists of files, counts. The program needs nlohmann/json, libddp does not.
///
/// An object has at most 64 MiB. One that is longer, cannot be converted or has another type than its
/// receiver expects is an InvalidInput on all ranks or at its receiver, which names the sender; the group
/// stays usable. A root that is not a rank is an InvalidInput at once.
namespace ddp {

inline constexpr std::size_t kMostObjectBytes = 64 * 1024 * 1024;

namespace objects {

// The first byte of a message tells whether it holds no object, an object, or the reason why there is none.
inline constexpr char kNothing = 'n', kObject = 'o', kProblem = 'p';

template <class T>
std::string encode(const T& object) {
    try {
        std::string bytes(1, kObject);
        nlohmann::json::to_cbor(nlohmann::json(object), bytes);
        if (bytes.size() <= kMostObjectBytes) return bytes;
        return kProblem + std::to_string(bytes.size()) + " bytes, at most " +
               std::to_string(kMostObjectBytes) + " go";
    } catch (const std::exception& error) {  // a to_json may throw anything
        return kProblem + std::string(error.what());
    }
}

inline void require_root(const ProcessGroup& group, const std::string& call, int root) {
    if (root >= 0 && root < group.size()) return;
    throw InvalidInput(call + ": root " + std::to_string(root) + " is not a rank of 0-" +
                       std::to_string(group.size() - 1));
}

inline void throw_problem(const std::string& call, std::size_t rank, const std::string& why) {
    throw InvalidInput(call + ": the object of rank " + std::to_string(rank) + ": " + why);
}

/// Every rank's message; throws the first problem on all ranks.
inline std::vector<std::string> exchange(ProcessGroup& group, const std::string& call,
                                         const std::string& mine) {
    std::vector<std::string> all = group.all_gather_bytes(mine);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
        if (!all[rank].empty() && all[rank][0] == kProblem) throw_problem(call, rank, all[rank].substr(1));
    }
    return all;
}

template <class T>
T decode(const std::string& call, std::size_t rank, const std::string& message) {
    if (message.empty() || message[0] != kObject)
        throw_problem(call, rank, "there is none: ranks differ about the root");
    try {
        return nlohmann::json::from_cbor(message.begin() + 1, message.end()).template get<T>();
    } catch (const std::exception& error) {
        throw InvalidInput(call + ": the object of rank " + std::to_string(rank) + ": " + error.what());
    }
}

template <class T>
std::vector<T> decode_all(const std::string& call, const std::vector<std::string>& messages) {
    std::vector<T> objects;
    for (std::size_t rank = 0; rank < messages.size(); ++rank)
        objects.push_back(decode<T>(call, rank, messages[rank]));
    return objects;
}

}  // namespace objects

/// Every rank's object, by rank.
template <class T>
std::vector<T> all_gather_object(ProcessGroup& group, const T& object) {
    constexpr const char* kCall = "all_gather_object";
    return objects::decode_all<T>(kCall, objects::exchange(group, kCall, objects::encode(object)));
}

/// The root's object, on all ranks; other ranks' objects are ignored.
template <class T>
T broadcast_object(ProcessGroup& group, const T& object, int root) {
    constexpr const char* kCall = "broadcast_object";
    objects::require_root(group, kCall, root);
    const std::string mine =
        group.rank() == root ? objects::encode(object) : std::string(1, objects::kNothing);
    const std::vector<std::string> all = objects::exchange(group, kCall, mine);
    return objects::decode<T>(kCall, static_cast<std::size_t>(root), all[static_cast<std::size_t>(root)]);
}

/// On the root every rank's object, by rank; nothing elsewhere.
template <class T>
std::vector<T> gather_object(ProcessGroup& group, const T& object, int root) {
    constexpr const char* kCall = "gather_object";
    objects::require_root(group, kCall, root);
    const std::vector<std::string> all = objects::exchange(group, kCall, objects::encode(object));
    return group.rank() == root ? objects::decode_all<T>(kCall, all) : std::vector<T>{};
}

/// The root's objects[rank()]; the root has one per rank, other ranks' objects are ignored.
template <class T>
T scatter_object(ProcessGroup& group, const std::vector<T>& objects, int root) {
    constexpr const char* kCall = "scatter_object";
    objects::require_root(group, kCall, root);
    std::string mine(1, objects::kNothing);
    if (group.rank() == root) {
        mine = objects.size() == static_cast<std::size_t>(group.size())
                   ? objects::encode(objects)
                   : objects::kProblem + std::to_string(objects.size()) + " of them for " +
                         std::to_string(group.size()) + " ranks";
    }
    const std::vector<std::string> all = objects::exchange(group, kCall, mine);
    const auto from = static_cast<std::size_t>(root);
    return objects::decode<std::vector<T>>(kCall, from, all[from]).at(static_cast<std::size_t>(group.rank()));
}

}  // namespace ddp

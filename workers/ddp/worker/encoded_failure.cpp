#include "ddp/worker/encoded_failure.h"

#include "ddp/types.h"

namespace ddp {

namespace {

// The first letter is the type. Other errors end their rank, so the others have lost it.
constexpr char kTimeout = 't', kMismatch = 'm', kLost = 'l', kOther = 'o';

}  // namespace

std::string encode_failure(const std::exception_ptr& failure) {
    try {
        std::rethrow_exception(failure);
    } catch (const TimeoutError& error) {
        return kTimeout + std::string(error.what());
    } catch (const MismatchError& error) {
        return kMismatch + std::string(error.what());
    } catch (const PeerLostError& error) {
        return kLost + std::string(error.what());
    } catch (const std::exception& error) {
        return kOther + std::string(error.what());
    }
}

void throw_encoded_failure(std::string_view text, const std::string& context) {
    const char kind = text.empty() ? kOther : text.front();
    const std::string what = context + std::string(text.substr(text.empty() ? 0 : 1));
    if (kind == kTimeout) throw TimeoutError(what);
    if (kind == kMismatch) throw MismatchError(what);
    throw PeerLostError(what);
}

}  // namespace ddp

/* Sizes of the structures that "library.py" declares again, in its order: they are compared at load. */

#include "rounds.h"

int64_t struct_size(int64_t index) {
    static const int64_t sizes[] = {
        sizeof(Spans), sizeof(Layer), sizeof(QuantisedPanel), sizeof(Linear), sizeof(DecoderLayer), sizeof(Decoder), sizeof(NewTokens),
        sizeof(Processors), sizeof(Row), sizeof(Rounds),
    };
    return index < (int64_t)(sizeof sizes / sizeof *sizes) ? sizes[index] : -1;
}

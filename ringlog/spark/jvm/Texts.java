package ringlog.spark;

import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Short texts that come again and again, such as tags: the same value each time, on the heap.
 *
 * <p>What Spark does with a text (its map of groups hashes the bytes) begins with a copy, unless the text is
 * all of an array of its own. So a copy made once saves one for each row. Where texts hardly ever repeat the
 * search costs more than it saves: then it is given up, and looked at again after some time.
 */
final class Texts {
  /** Longer texts are left where they lie. */
  static final int BYTES_MAX = 16;

  /** Each text has two, one beside the other. */
  private static final int PLACES = 1 << 12;

  private static final int PLACE_SHIFT = 64 - 12;

  /** Texts looked for before it is decided whether it pays, and passed by until it is tried again. */
  private static final int TRIED = 1 << 13;

  private static final int RESTED = 1 << 19;
  private static final UTF8String EMPTY = UTF8String.EMPTY_UTF8;

  private final long[] words = new long[2 * PLACES];
  private final UTF8String[] texts = new UTF8String[PLACES];
  private int tried;
  private int missed;
  private int rest;

  /**
   * The text at an address. Reads up to 8 bytes beyond it, which have to be there (Chunk.SLACK).
   */
  UTF8String at(long address, int length) {
    if (length > BYTES_MAX) {
      return UTF8String.fromAddress(null, address, length);
    }
    if (rest > 0) {
      rest--;
      return UTF8String.fromAddress(null, address, length);
    }
    if (length == 0) {
      return EMPTY;
    }
    long first = Platform.getLong(null, address);
    long second = 0;
    if (length <= 8) {
      first &= -1L >>> (64 - 8 * length);
    } else {
      second = Platform.getLong(null, address + 8) & (-1L >>> (128 - 8 * length));
    }
    long mixed = (first ^ Long.rotateLeft(second, 32) ^ length) * 0x9E3779B97F4A7C15L;
    int place = (int) (mixed >>> PLACE_SHIFT);
    tried++;
    UTF8String found = kept(place, first, second, length);
    if (found == null) {
      found = kept(place ^ 1, first, second, length);
    }
    if (found == null) {
      missed++;
      found = UTF8String.fromAddress(null, address, length).copy();
      int at = texts[place] == null ? place : place ^ 1;
      words[2 * at] = first;
      words[2 * at + 1] = second;
      texts[at] = found;
    }
    if (tried == TRIED) {
      rest = missed > TRIED / 4 ? RESTED : 0;
      tried = missed = 0;
    }
    return found;
  }

  /** The text of a place, if it is this one; of those that differ in zeros at their end the length tells. */
  private UTF8String kept(int place, long first, long second, int length) {
    if (words[2 * place] != first || words[2 * place + 1] != second) {
      return null;
    }
    UTF8String found = texts[place];
    return found != null && found.numBytes() == length ? found : null;
  }
}

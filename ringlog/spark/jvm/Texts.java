package ringlog.spark;

import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Cache of short texts that repeat, such as tags. Equal texts get the same copy on the heap.
 *
 * <p>Spark copies a text before it uses it (its map of groups hashes the bytes), unless the text fills a
 * whole array. One cached copy therefore saves one copy per row. If texts rarely repeat, the lookup costs
 * more than it saves. Then the cache is bypassed, and tried again after RESTED texts.
 */
final class Texts {
  /** Maximum length in bytes of a cached text. Longer texts are not copied. */
  static final int BYTES_MAX = 16;

  /** Slots of the cache. A text may be in one of two: the slot of its hash and the one next to it. */
  private static final int PLACES = 1 << 12;

  private static final int PLACE_SHIFT = 64 - 12;

  /**
   * After TRIED lookups the cache is bypassed for the next RESTED texts if more than a quarter of the lookups
   * missed.
   */
  private static final int TRIED = 1 << 13;

  private static final int RESTED = 1 << 19;
  private static final UTF8String EMPTY = UTF8String.EMPTY_UTF8;

  private final long[] words = new long[2 * PLACES];
  private final UTF8String[] texts = new UTF8String[PLACES];
  private int tried;
  private int missed;
  private int rest;

  /**
   * Return the text at an address. Reads up to 7 bytes after the text; they must be readable (Chunk.SLACK).
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

  /**
   * Return the text in a slot if it is the wanted one, else null. The length distinguishes texts that
   * differ only in trailing zero bytes.
   */
  private UTF8String kept(int place, long first, long second, int length) {
    if (words[2 * place] != first || words[2 * place + 1] != second) {
      return null;
    }
    UTF8String found = texts[place];
    return found != null && found.numBytes() == length ? found : null;
  }
}

package ringlog.spark;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.arrow.memory.util.MemoryUtil;
import org.apache.spark.unsafe.Platform;

/**
 * Memory that frames are copied into before anything looks at them: what was checked is what is used,
 * whatever becomes of the file, and a failing disk is an error where it would be a signal under a mapping.
 *
 * <p>Given back to be used again, since touching new memory costs as much as copying into it.
 */
final class Chunk {
  /** Bytes read at a time, unless one frame is larger: what a processor's cache takes beside other things. */
  static final int BYTES = 1 << 20;

  /** Bytes behind what was read that may be looked at, whatever they are. */
  static final int SLACK = 16;

  /** Chunks kept for the next task; of more than BYTES none is. */
  private static final int KEPT_MAX = 16;

  private static final ConcurrentLinkedQueue<Chunk> KEPT = new ConcurrentLinkedQueue<>();
  private static final AtomicInteger KEPT_COUNT = new AtomicInteger();

  private ByteBuffer buffer;

  /** Where the bytes lie. */
  long address;

  private Chunk(int size) {
    take(size);
  }

  private void take(int size) {
    buffer = ByteBuffer.allocateDirect(size + SLACK);
    address = MemoryUtil.getByteBufferAddress(buffer);
  }

  /** One to use, with room for BYTES. */
  static Chunk get() {
    Chunk found = KEPT.poll();
    if (found == null) {
      return new Chunk(BYTES);
    }
    KEPT_COUNT.decrementAndGet();
    return found;
  }

  /** Nobody uses it any more. */
  void giveBack() {
    if (buffer.capacity() != BYTES + SLACK) {
      return;
    }
    if (KEPT_COUNT.incrementAndGet() > KEPT_MAX) {
      KEPT_COUNT.decrementAndGet();
      return;
    }
    KEPT.add(this);
  }

  /** Have room for so many bytes; what is in it may be lost. */
  void reserve(int size) {
    if (size + SLACK > buffer.capacity()) {
      take(size);
    }
  }

  /** Copy bytes of a file; the number is less than asked for where the file ends. */
  int read(FileChannel channel, long position, int size) throws IOException {
    reserve(size);
    buffer.clear().limit(size);
    int done = 0;
    while (done < size) {
      int count = channel.read(buffer, position + done);
      if (count < 0) {
        break;
      }
      done += count;
    }
    return done;
  }

  /** Copy bytes of an array. */
  void copy(byte[] from, int at, int size) {
    reserve(size);
    Platform.copyMemory(from, Platform.BYTE_ARRAY_OFFSET + at, null, address, size);
  }

  ByteBuffer view(int from, int size) {
    ByteBuffer found = buffer.duplicate();
    found.clear().position(from).limit(from + size);
    return found;
  }
}

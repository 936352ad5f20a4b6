package ringlog.spark;

import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Proxy;
import java.util.LinkedHashSet;
import java.util.Set;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.types.StructType;

/** A scan of pieces, of which only the columns are made that the query uses. */
final class RinglogScan implements SupportsPushDownRequiredColumns, Scan, Batch {
  private final Scan pieces;
  private final String layout;
  private StructType wanted;
  private Batch batch;

  RinglogScan(Scan pieces, StructType schema, String layout) {
    this.pieces = pieces;
    this.wanted = schema;
    this.layout = layout;
  }

  /** The plan does not depend on columns, so that scans of one load share it, whatever each of them asks. */
  @Override
  public void pruneColumns(StructType required) {
    wanted = required;
  }

  @Override
  public Scan build() {
    return this;
  }

  @Override
  public StructType readSchema() {
    return wanted;
  }

  @Override
  public String description() {
    return "ringlog " + wanted.catalogString();
  }

  @Override
  public ColumnarSupportMode columnarSupportMode() {
    return ColumnarSupportMode.SUPPORTED;
  }

  @Override
  public Batch toBatch() {
    return this;
  }

  @Override
  public InputPartition[] planInputPartitions() {
    return batch().planInputPartitions();
  }

  @Override
  public PartitionReaderFactory createReaderFactory() {
    return new ColumnsFactory(batch().createReaderFactory(), wanted, layout);
  }

  private Batch batch() {
    if (batch == null) {
      batch = pieces.toBatch();
    }
    return batch;
  }

  /**
   * Python's stream, whose tasks read through pieces. It is whatever Spark makes of it (admission control,
   * availableNow, metrics): so it is not wrapped by a class of ours, which would have to know all of that.
   */
  @Override
  public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
    MicroBatchStream inner = pieces.toMicroBatchStream(checkpointLocation);
    Object proxy =
        Proxy.newProxyInstance(
            getClass().getClassLoader(),
            interfacesOf(inner.getClass()).toArray(new Class<?>[0]),
            (self, method, arguments) -> {
              if (method.getName().equals("equals")) {
                return self == arguments[0];
              }
              try {
                Object found = method.invoke(inner, arguments);
                return method.getName().equals("createReaderFactory")
                    ? new ColumnsFactory((PartitionReaderFactory) found, wanted, layout)
                    : found;
              } catch (InvocationTargetException e) {
                throw e.getCause();
              }
            });
    return (MicroBatchStream) proxy;
  }

  private static Set<Class<?>> interfacesOf(Class<?> kind) {
    Set<Class<?>> found = new LinkedHashSet<>();
    for (Class<?> at = kind; at != null; at = at.getSuperclass()) {
      for (Class<?> each : at.getInterfaces()) {
        found.add(each);
      }
    }
    return found;
  }
}

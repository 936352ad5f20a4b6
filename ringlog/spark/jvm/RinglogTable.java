package ringlog.spark;

import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.Column;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** Topics as a table. Reads use pieces; all other calls are delegated to the table of the Python source. */
final class RinglogTable implements SupportsRead, SupportsWrite {
  private final Table python;
  private final Table pieces;
  private final StructType schema;

  RinglogTable(Table python, Table pieces, StructType schema) {
    this.python = python;
    this.pieces = pieces;
    this.schema = schema;
  }

  @Override
  public String name() {
    return python.name();
  }

  @Override
  public Column[] columns() {
    return python.columns();
  }

  @Override
  public Map<String, String> properties() {
    return python.properties();
  }

  @Override
  public Set<TableCapability> capabilities() {
    return python.capabilities();
  }

  @Override
  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    CaseInsensitiveStringMap asked = RinglogSource.asked(options, schema);
    String layout = options.getOrDefault("layout", "ringlog");
    return new RinglogScan(((SupportsRead) pieces).newScanBuilder(asked).build(), schema, layout);
  }

  @Override
  public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
    return ((SupportsWrite) python).newWriteBuilder(info);
  }
}

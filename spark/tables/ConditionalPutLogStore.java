package fencepost;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.Arrays;
import java.util.Iterator;
import java.util.UUID;

import io.delta.storage.S3SingleDriverLogStore;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/**
 * Delta's log on S3: a commit is one PUT with `If-None-Match: *`, so that S3 accepts one of the commits of a version,
 * whichever processes they come from and however late they arrive.
 *
 * Each commit has an id as metadata of its object. A PUT whose reply is lost is repeated by the AWS SDK, and then refused
 * because of its own first attempt: by the id, this commit is told from another one. Source: io.delta.storage.LogStore;
 * hadoop-aws, fs.option.create.conditional.overwrite (HADOOP-19256); Amazon S3, conditional writes.
 *
 * Written for Janino, the compiler in Spark, which knows no type arguments: hence the casts.
 */
public class ConditionalPutLogStore extends S3SingleDriverLogStore {

    private static final String CONDITION = "fs.option.create.conditional.overwrite";
    private static final String METADATA = "fencepost-commit";
    // hadoop-aws writes options with the first prefix as user metadata, and reads these as attributes with the second.
    private static final String METADATA_OPTION = "fs.s3a.create.header." + METADATA;
    private static final String METADATA_ATTRIBUTE = "header." + METADATA;

    public ConditionalPutLogStore(Configuration hadoopConf) {
        super(hadoopConf);
    }

    /**
     * Write a file of the log, one action a line. With `overwrite` (Delta's pointer to its last checkpoint, which is a
     * hint) unconditionally.
     *
     * @throws FileAlreadyExistsException another commit has this path; nothing was written
     * @throws IOException nothing was written, or the outcome is not known
     */
    public void write(Path path, Iterator actions, Boolean overwrite, Configuration hadoopConf) throws IOException {
        if (overwrite.booleanValue()) {
            super.write(path, actions, overwrite, hadoopConf);
            return;
        }
        FileSystem fileSystem = path.getFileSystem(hadoopConf);
        String id = UUID.randomUUID().toString();
        FSDataOutputStream stream = open(fileSystem, path, id);
        boolean whole = false;
        try {
            while (actions.hasNext()) {
                stream.write((((String) actions.next()) + "\n").getBytes(StandardCharsets.UTF_8));
            }
            whole = true;
        } finally {
            if (!whole) {
                stream.abort(); // close() would write what there is
            }
        }
        try {
            stream.close();
        } catch (IOException failure) {
            if (!isMine(fileSystem, path, id, failure)) {
                throw (FileAlreadyExistsException) new FileAlreadyExistsException(path.toString()).initCause(failure);
            }
        }
    }

    /** Open the object for a conditional PUT in close(), or for a multipart upload with a conditional completion. */
    private static FSDataOutputStream open(FileSystem fileSystem, Path path, String id) throws IOException {
        FSDataOutputStreamBuilder builder = fileSystem.createFile(path);
        builder.create();
        builder.overwrite(false);
        builder.recursive();
        builder.must(CONDITION, true); // a file system that cannot do this refuses it
        builder.must(METADATA_OPTION, id);
        try {
            return (FSDataOutputStream) builder.build();
        } catch (org.apache.hadoop.fs.FileAlreadyExistsException there) {
            throw (FileAlreadyExistsException) new FileAlreadyExistsException(path.toString()).initCause(there);
        }
    }

    /**
     * Check after a failed PUT whether the object has this commit's id.
     *
     * Another object there is never replaced by this PUT, however late it arrives: then it has failed for good.
     *
     * @throws IOException there is no object: the failure, since the PUT may still arrive
     */
    private static boolean isMine(FileSystem fileSystem, Path path, String id, IOException failure) throws IOException {
        try {
            byte[] owner = (byte[]) fileSystem.getXAttrs(path).get(METADATA_ATTRIBUTE);
            return Arrays.equals(id.getBytes(StandardCharsets.UTF_8), owner);
        } catch (IOException unknown) {
            failure.addSuppressed(unknown);
            throw failure;
        }
    }
}
